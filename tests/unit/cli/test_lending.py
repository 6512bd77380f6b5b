"""The provider's supervisor: what it does next, on a clock of its own."""

from hypothesis import given
from hypothesis import strategies as st

from fusion_flows.cli.pool.restart import Backoff, Restarts
from fusion_flows.cli.provider.lending import Act, Lending, Seen


def lending(*workers: str) -> Lending:
    return Lending(history={w: Restarts(policy=Backoff()) for w in workers})


def test_workers_start_at_once_and_again_with_back_off() -> None:
    state, acts = lending("a", "b").after(Seen(now=0.0, wanted=True))
    assert acts == [Act(what="start", worker="a"), Act(what="start", worker="b")]
    state, acts = state.after(Seen(now=1.0, wanted=True, ended=frozenset({"a"})))
    assert acts == []
    state, acts = state.after(Seen(now=2.0, wanted=True))
    assert acts == [Act(what="start", worker="a")]
    state, acts = state.after(Seen(now=2.5, wanted=True, ended=frozenset({"a"})))
    state, acts = state.after(Seen(now=4.0, wanted=True))
    assert acts == []
    _, acts = state.after(Seen(now=4.5, wanted=True))
    assert acts == [Act(what="start", worker="a")]


def test_a_worker_that_ran_for_long_starts_again_soon() -> None:
    restarts = Restarts(policy=Backoff())
    now = 0.0
    for _ in range(10):
        restarts = restarts.started(now).ended(now + 1.0)
        assert restarts.due_at is not None
        now = restarts.due_at
    assert restarts.due_at == now
    long = restarts.started(now).ended(now + 100.0)
    assert long.due_at == now + 101.0


def test_a_busy_worker_is_waited_for_and_a_free_one_ends_once() -> None:
    state, _ = lending("a", "b").after(Seen(now=0.0, wanted=True))
    state, acts = state.after(Seen(now=1.0, wanted=False, busy={"a": True, "b": False}))
    assert acts == [Act(what="end", worker="b")]
    state, acts = state.after(Seen(now=2.0, wanted=False, busy={"a": True, "b": False}))
    assert acts == []
    state, acts = state.after(
        Seen(now=3.0, wanted=False, ended=frozenset({"b"}), busy={"a": False})
    )
    assert acts == [Act(what="end", worker="a")]


def test_a_broker_that_does_not_answer_is_not_waited_for_long() -> None:
    state, _ = lending("a").after(Seen(now=0.0, wanted=True))
    state, acts = state.after(Seen(now=1.0, wanted=False, busy=None))
    assert acts == []
    # An answer in between says that it is alive.
    state, acts = state.after(Seen(now=5.0, wanted=False, busy={"a": True}))
    assert acts == []
    state, acts = state.after(Seen(now=6.0, wanted=False, busy=None))
    state, acts = state.after(Seen(now=15.9, wanted=False, busy=None))
    assert acts == []
    state, acts = state.after(Seen(now=16.0, wanted=False, busy=None))
    assert acts == [Act(what="end", worker="a")]


def test_machines_do_not_come_back_all_at_once() -> None:
    def due_at(chance: float) -> float | None:
        state, _ = lending("a").after(Seen(now=0.0, wanted=True))
        ended = Seen(now=5.0, wanted=True, ended=frozenset({"a"}), chance=chance)
        return state.after(ended)[0].history["a"].due_at

    assert (due_at(0.0), due_at(0.5), due_at(1.0)) == (6.0, 6.25, 6.5)


def test_a_worker_that_does_not_end_is_killed() -> None:
    state, _ = lending("a").after(Seen(now=0.0, wanted=True))
    state, _ = state.after(Seen(now=1.0, wanted=False, busy={}))
    state, acts = state.after(Seen(now=15.9, wanted=False, busy={}))
    assert acts == []
    state, acts = state.after(Seen(now=16.0, wanted=False, busy={}))
    assert acts == [Act(what="kill", worker="a")]
    _, acts = state.after(Seen(now=17.0, wanted=False, ended=frozenset({"a"})))
    assert acts == []


def test_the_window_opens_again() -> None:
    state, _ = lending("a").after(Seen(now=0.0, wanted=True))
    state, _ = state.after(Seen(now=1.0, wanted=False, busy={"a": False}))
    state, acts = state.after(Seen(now=100.0, wanted=False, ended=frozenset({"a"}), busy={}))
    assert acts == []
    _, acts = state.after(Seen(now=200.0, wanted=True))
    assert acts == [Act(what="start", worker="a")]


def test_a_window_that_opens_while_a_worker_finishes_starts_it_anew() -> None:
    """The broker gives no stage to a worker that was once taken back."""
    state, _ = lending("a", "b").after(Seen(now=0.0, wanted=True))
    state, acts = state.after(Seen(now=1.0, wanted=False, busy={"a": True, "b": False}))
    assert acts == [Act(what="end", worker="b")]
    ended = frozenset({"b"})
    state, acts = state.after(Seen(now=3.0, wanted=True, ended=ended, busy={"a": True}))
    assert acts == []
    state, acts = state.after(Seen(now=4.0, wanted=True, busy={"a": False}))
    assert acts == [Act(what="end", worker="a")]
    state, acts = state.after(Seen(now=5.0, wanted=True, ended=frozenset({"a"})))
    assert acts == [Act(what="start", worker="b")]
    _, acts = state.after(Seen(now=6.0, wanted=True))
    assert acts == [Act(what="start", worker="a")]


STEPS = st.lists(
    st.tuples(
        st.floats(0.1, 30.0),
        st.booleans(),
        st.sets(st.sampled_from("ab")),
        st.none() | st.dictionaries(st.sampled_from("ab"), st.booleans()),
    ),
    max_size=40,
)


@given(STEPS)
def test_nothing_is_started_twice_or_ended_while_busy(
    steps: list[tuple[float, bool, set[str], dict[str, bool] | None]],
) -> None:
    state, now = lending("a", "b"), 0.0
    running: set[str] = set()
    leaving: set[str] = set()
    silent_since: float | None = None
    last_start: dict[str, float] = {}
    for passed, wanted, ended, busy in steps:
        now += passed
        running -= ended
        leaving = set(running) if not wanted else leaving - ended
        silent_since = (silent_since or now) if leaving and busy is None else None
        seen = Seen(now=now, wanted=wanted, ended=frozenset(ended), busy=busy)
        state, acts = state.after(seen)
        for act in acts:
            if act.what == "start":
                assert wanted
                assert not leaving
                assert act.worker not in running
                assert now - last_start.get(act.worker, -1.0) >= 1.0
                last_start[act.worker] = now
                running.add(act.worker)
            elif act.what == "kill":
                assert act.worker in running
            elif silent_since is not None:
                assert act.worker in leaving
                assert now - silent_since >= 10.0
            else:
                assert act.worker in leaving
                assert busy is None or not busy.get(act.worker, False)
        assert state.running == running
