"""Recorded texts of failures from Spark 4.2. An error of Bascule is inserted as a worker or batch function raises it."""

from __future__ import annotations

from pyspark.errors import PySparkException

from bascule.core.errors import BasculeError
from bascule.pipelines.failures import CarriedError, encoded

WORKER = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "changes.py", line 7, in checked
    raise RuntimeError("unlucky")
RuntimeError: unlucky

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)
"""
TRACEBACK = """Traceback (most recent call last):
  File "rules.py", line 14, in priced
    raise BadRecord(text)
"""
BATCH = """An exception was thrown from the Python worker:
{traceback}{raised}"""
QUERY = """[PYTHON_EXCEPTION] An exception was thrown from the Python worker: {traceback}{raised}
 SQLSTATE: 38000
=== Streaming Query ===
Identifier: [id = 98f451f6-47bf-40ac-9e7b-5d6c708220b2, runId = 187906c0-78fe-4ec0-bad1-dd6837aa5073]

Logical Plan:
WriteToMicroBatchDataSource noop-table

JVM stacktrace:
org.apache.spark.sql.execution.streaming.runtime.StreamExecution.runStream(StreamExecution.scala:1)
"""
FOREACH_BATCH = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "bascule/pipelines/failures.py", line 50, in carried
    raise CarriedError(encoded(error, _SECRET)) from None
{raised}

=== Streaming Query ===
"""


def said_by_spark(text: str, error: BasculeError) -> PySparkException:
    """Return a failure of Spark with ``text``, in which a task or batch function has raised ``error``."""
    return PySparkException(text.format(traceback=TRACEBACK, raised=f"{CarriedError.__module__}.CarriedError: {encoded(error)}"))
