"""The pieces behind `fusion up`, `fusion down` and `fusion token`: the broker of a pool on this machine."""
