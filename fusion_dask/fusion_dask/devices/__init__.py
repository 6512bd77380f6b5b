"""The devices of a machine: finding them, sharing them out, and emulating others."""
