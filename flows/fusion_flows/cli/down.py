"""`fusion down`: end the broker of this home.

Invariant: nothing that is kept is touched.
"""

__all__ = ["down"]


def down() -> None:
    """End the broker that runs here; runs, tokens, profiles and the store are kept."""
    from fusion_flows.cli.pool.place import BrokerPlace
    from fusion_flows.cli.pool.start import END_TIMEOUT_S
    from fusion_tasks import settings

    place = BrokerPlace(home=settings.current().home)
    if not place.end_supervisor(END_TIMEOUT_S):
        print(f"no broker runs in {place.home}")  # noqa: T201
        return
    print(f"the broker is down; what it keeps is in {place.folder}")  # noqa: T201
