"""The graph: capture, operators, cost, cut into stages, programs as data. Pure: no Dask, no Prefect."""
