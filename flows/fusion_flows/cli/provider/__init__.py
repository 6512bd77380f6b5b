"""The pieces behind `fusion join`: lending the devices of this machine to a pool."""
