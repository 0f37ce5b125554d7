"""Executes a run on several workers: processes of this machine, actors of a Ray cluster, jobs of a Slurm cluster.

The coordinator holds the run's lock and hands out jobs. A worker writes the rows of its jobs to its own segment of the
run's journal, so every worker must have access to the run's folder. Only `kvbench.runner.execute`,
`kvbench.runner.work` and `kvbench.cli.placed` import this package.
"""
