"""The benchmark: every case beside its peers and its floor, in one run. See benchmarks/README.md.

`run.run` measures and `run.list_cases` says what there is. Neither module nor this package imports a framework before
something is measured.
"""
