"""Reports: tables and figures of a sweep, from the files its runs have left.

runs.py reads runs and refuses to compare what was measured differently; equivalent.py holds the one calculation that is
more than a mean; tables.py and figures.py write; comparisons.py says what each report shows; results.py writes
docs/RESULTS.md from committed tables.
"""
