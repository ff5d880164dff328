"""`umbel history`: tables from the event log, and what they tell.

`build` runs Spark; everything else reads the tables with duckdb. Both are loaded by the verb that
needs them, so that help and mistakes cost nothing.
"""
