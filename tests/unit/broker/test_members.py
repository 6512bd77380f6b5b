"""Membership: what the pool believes after any sequence of events."""

from hypothesis import given
from hypothesis import strategies as st

from fusion_dask.broker import members as members_module
from fusion_dask.broker.members import Hello, Members
from fusion_dask.planner.profile import Profile

PROFILE = Profile(
    device="cpu",
    kind="cpu",
    threads=1,
    flops_per_s={"float32": 1e9},
    memory_bytes_per_s=1e9,
    free_memory_bytes=1 << 30,
    measured_at=1.0,
    probe_s=1.0,
)


def hello(name: str, *, backup: bool = False, probes: bool = True) -> Hello:
    provider = name.rpartition("-")[0]
    return Hello(
        name=name, provider=provider, device="cpu", kind="cpu", backup=backup, probes=probes
    )


def test_a_worker_is_measured_before_it_is_used() -> None:
    pool = Members().joined(hello("a-0"), "tls://a", now=1.0)
    assert pool.by_name["a-0"].state == "probing"
    pool = pool.profiled("tls://a", PROFILE, now=2.0)
    assert (pool.by_name["a-0"].state, pool.by_name["a-0"].since) == ("active", 2.0)
    again = pool.profiled("tls://a", PROFILE, now=3.0)
    assert again.by_name["a-0"].since == 2.0


def test_a_backup_is_measured_too_and_stays_backup() -> None:
    pool = Members().joined(hello("a-0", backup=True), "tls://a", now=1.0)
    assert pool.profiled("tls://a", PROFILE, now=2.0).by_name["a-0"].state == "backup"


def test_draining_asks_all_workers_of_one_provider_and_no_other() -> None:
    pool = Members()
    for name in ("a-0", "a-1", "b-0"):
        pool = pool.joined(hello(name, probes=False), f"tls://{name}", now=1.0)
    pool = pool.drained("a", now=2.0)
    assert {n: m.state for n, m in pool.by_name.items()} == {
        "a-0": "draining",
        "a-1": "draining",
        "b-0": "active",
    }
    measured = pool.profiled("tls://a-0", PROFILE, now=3.0)
    assert measured.by_name["a-0"].state == "draining"


def test_a_worker_that_comes_back_keeps_its_profile_until_it_is_measured_again() -> None:
    pool = Members().joined(hello("a-0"), "tls://a:1", now=1.0)
    pool = pool.profiled("tls://a:1", PROFILE, now=2.0).left("tls://a:1", "gone", now=3.0)
    assert pool.at("tls://a:1") is None
    pool = pool.joined(hello("a-0"), "tls://a:2", now=4.0)
    member = pool.by_name["a-0"]
    assert (member.state, member.address, member.profile) == ("probing", "tls://a:2", PROFILE)
    late = pool.left("tls://a:1", "the old connection ended", now=5.0)
    assert late.by_name["a-0"].state == "probing"


def test_only_so_many_that_have_left_are_remembered() -> None:
    pool = Members()
    for index in range(members_module.REMEMBERED + 5):
        address = f"tls://{index}"
        pool = pool.joined(hello(f"a-{index}"), address, now=float(index))
        pool = pool.left(address, "gone", now=float(index))
    assert len(pool.by_name) == members_module.REMEMBERED
    assert "a-0" not in pool.by_name


EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "profile", "drain", "leave"]), st.integers(0, 3)),
    max_size=30,
)


@given(EVENTS)
def test_whatever_happens_one_address_is_one_present_member(events: list[tuple[str, int]]) -> None:
    pool = Members()
    for now, (event, index) in enumerate(events):
        address, name = f"tls://{index}", f"p{index % 2}-{index}"
        if event == "join":
            pool = pool.joined(hello(name), address, now=float(now))
        elif event == "profile":
            pool = pool.profiled(address, PROFILE, now=float(now))
        elif event == "drain":
            pool = pool.drained(f"p{index % 2}", now=float(now))
        else:
            pool = pool.left(address, "gone", now=float(now))
            assert pool.at(address) is None
        present = [m.address for m in pool.by_name.values() if m.state != "left"]
        assert len(present) == len(set(present))
        for member in pool.by_name.values():
            assert member.since <= now
            assert member.state != "active" or member.profile is not None
