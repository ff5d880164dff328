"""Where task bodies run: pools, the jobs that they get, and the code on their far side."""
