"""Pools: where jobs run. Five of them, one contract (`base`), one conformance suite.

| pool | runs a job in | soft limit | hard limit, cancel |
|---|---|---|---|
| prefork | a child process | exception in the task | the child is killed and replaced |
| threads | a thread | exception in the task | the thread is abandoned and replaced |
| gevent | a greenlet | exception in the task | the greenlet is killed |
| asyncio | a coroutine; a thread for plain functions | exception at its await point | cancelled |
| solo | the calling thread | exception in the task | exception in the task |

Only prefork can end code that refuses to end. The others report the end, free the slot and count
what is left behind as abandoned.
"""
