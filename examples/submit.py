"""The program of `spark-submit`: spark-submit OPTIONS submit.py pipelines --config FILE."""

from bascule.cli.main import main

main()
