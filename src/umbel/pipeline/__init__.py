"""From the event log to tables that people query, on Spark.

    log (Parquet segments) -> events: prepare, unique -> task_fold -> tables/* -> TABLES/<table>/

Two ideas carry it. What is known of a task is a *summary*, the greatest event of each class, and
merging two summaries is taking the greater of each: the order and repetition of events do not
matter. And what new events touch is found by keys (`increment`): only that is computed again, from
all of its events, so that a build costs what is new and gives the tables of a build of everything.

| module        | what it does                                                     | needs   |
| ------------- | ---------------------------------------------------------------- | ------- |
| session       | starts Spark: every setting is there                             | pyspark |
| class_archive | Java's classes of Spark, kept, so that it starts faster          | pyspark |
| schemas       | the columns of the log, as Spark's types                         | pyspark |
| log           | the segments of the log: which are there, which are new          | pyspark |
| storage       | the files of the tables, and the index that makes them visible   | pyspark |
| delta         | the same files as Delta Lake tables, for other readers           |         |
| footers       | what the footer of a Parquet file says                           |         |
| cells         | how time is cut into parts that are computed again               |         |
| events        | what every table needs of an event; each event once              | pyspark |
| task_fold     | the fold of tasks, generated from `cluster.task_states`          | pyspark |
| tables/       | one pure function DataFrame -> DataFrame for each table          | pyspark |
| increment     | new segments, carried through to every table that they change    | pyspark |
| build         | `umbel history build`: what is new, everything, or following     | pyspark |
| checking      | `umbel history check`: do the tables say what the log says       | pyspark |
| retention     | `umbel history retain`: which rows of old days stay in the log   | pyspark |
| reading, at   | tables read without Spark                                        | duckdb  |
| report/       | one page that shows them                                         | duckdb  |

Nothing on the way of an event is a Python function: all of it is Spark's own expressions.
"""
