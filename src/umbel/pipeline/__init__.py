"""From the event log to tables that people query, on Spark.

    log (Parquet segments) -> events: prepare, unique -> task_fold -> tables/* -> TABLES/<table>/

One idea carries it: what is known of a task is a *summary*, the greatest event of each class, and
merging two summaries is taking the greater of each. That is associative, commutative and
idempotent, so a batch over everything, many small increments, late events, duplicates and a run
that was killed and started again all give the same tables.

| module       | what it does                                                     | needs   |
| ------------ | ---------------------------------------------------------------- | ------- |
| session      | starts Spark: every setting is there                             | pyspark |
| schemas      | the columns of the log, as Spark's types                         | pyspark |
| storage      | all reads and writes of log, tables and work files               | pyspark |
| events       | what every table needs of an event; each event once              | pyspark |
| task_fold    | the fold of tasks, generated from `cluster.task_states`          | pyspark |
| tables/      | one pure function DataFrame -> DataFrame for each table          | pyspark |
| build        | `umbel history build`: batch, incremental, following             | pyspark |
| reading, at  | tables read without Spark                                        | duckdb  |
| report/      | one page that shows them                                         | duckdb  |

Nothing on the way of an event is a Python function: all of it is Spark's own expressions.
"""
