"""The Dask engine of Fusion: graph, planes, planner, broker, worker and pipeline."""
