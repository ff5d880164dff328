"""Write-once registers: whoever writes first has decided."""
