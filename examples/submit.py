"""The program of `spark-submit`: spark-submit OPTIONS submit.py pipelines --config FILE."""

import runpy

runpy.run_module("bascule.cli", run_name="__main__")
