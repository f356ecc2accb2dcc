"""How processes that do not know each other yet find out that they belong to one job.

The job's secret, the proof that a peer knows it, and the door where strangers are turned away. It
is on the ground because collectives and parameter servers need the same.
"""
