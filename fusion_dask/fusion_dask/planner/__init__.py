"""The planner: pure functions from a graph and measured workers to a plan."""
