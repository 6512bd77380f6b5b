"""A whole pool on the loopback: broker, providers, users and strangers, as a person sees them."""

import base64
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from fusion_dask.security.identity import pools
from fusion_storage.store import Store, open_store
from integration.cli.command import PACKAGES, Command, poll
from integration.cli.pool import Pool, marked, token_of


def leave(provider: Command) -> int:
    """Ctrl-C; the exit code."""
    assert provider.process is not None
    provider.process.send_signal(signal.SIGINT)
    return provider.finish(60).code


def workers_of(provider: Command) -> dict[str, psutil.Process]:
    """The worker processes of a provider by worker name."""
    found = {}
    for process in marked(provider.mark):
        words = process.cmdline()
        if "distributed.cli.dask_worker" in words:
            found[words[words.index("--name") + 1]] = process
    return found


def test_a_second_up_says_the_same(pool: Pool, token: str) -> None:
    again = pool.fusion("up")
    assert again.code == 0
    assert "is up already" in again.out
    assert f"fusion join {pool.address} --token {token}" in again.out
    secrets = json.loads((pool.home / "broker" / "state.json").read_text())["secrets"]
    assert not [name for name, secret in secrets.items() if secret in again.out]
    assert pool.fusion("up", "--port", str(pool.ports[0])).code == 0
    refused = pool.fusion("up", "--port", "1234")
    assert refused.code == 2
    assert "fusion down" in refused.err


def test_three_providers_join_and_share_nothing(pool: Pool, token: str) -> None:
    a = pool.join("a", "--devices", "cpu*2", "--memory", "100MB", token=token)
    b = pool.join("b", "--emulate", "rtx3080,rtx4090", "--link", "1gbit/1ms", token=token)
    c = pool.join("c", "--emulate", "cpu:0.5", "--backup", token=token)
    members = pool.wait_for("active", "a-0", "a-1", "b-0", "b-1")
    members = pool.wait_for("backup", "c-0")

    profile = members["b-1"]["profile"]
    assert profile["emulated"] == "rtx4090"
    assert set(profile["links"]) >= {"broker", "store"}
    # What the machine lends, for each of its two workers.
    assert members["a-0"]["profile"]["free_memory_bytes"] == 50_000_000
    peers = {name for m in members.values() for name in m["profile"]["links"]}
    assert peers & set(members), "workers measure each other"
    kept = pool.home / "broker" / "profiles"
    assert {path.stem for path in kept.glob("*.json")} >= set(members)

    processes = workers_of(a)
    shown = pool.fusion("status", "--json")
    assert {m["name"] for m in json.loads(shown.out)["members"]} == set(members)
    assert "rtx4090 (emulated)" in pool.fusion("status", environment={"COLUMNS": "200"}).out

    planned = pool.fusion("plan", "gpt", "--runnable", "--json")
    assert planned.code == 0, planned.err
    named = set(re.findall(r'"([abc]-\d)"', planned.out))
    assert named, "the live pool was planned for"
    assert named <= set(members)

    cores = {name: set(p.cpu_affinity()) for name, p in processes.items()}
    assert len(cores) == 2
    available = len(os.sched_getaffinity(0))
    if available > 1:
        assert cores["a-0"].isdisjoint(cores["a-1"])
    for process in processes.values():
        assert process.environ()["CUDA_VISIBLE_DEVICES"] == ""
        assert token not in " ".join(process.cmdline())
    for provider in (a, b, c):
        assert leave(provider) == 0
        assert not marked(provider.mark)
    members = pool.wait_for("left", "a-0", "a-1", "b-0", "b-1", "c-0")
    assert members["a-0"]["reason"] == "its provider takes it back"


def test_a_flow_runs_on_the_pool_and_a_worker_hands_over(
    pool: Pool, token: str, tmp_path: Path
) -> None:
    names = ("one", "two", "three")
    providers = {name: pool.join(name, "--emulate", "cpu", token=token) for name in names}
    spare = pool.join("spare", "--emulate", "cpu", "--backup", token=token)
    pool.wait_for("active", *(f"{name}-0" for name in names))
    pool.wait_for("backup", "spare-0")
    run = Command(folder=tmp_path, home=pool.home)
    quick = ["steps=80", "stages=2", "checkpoint_every=4", "layers=2", "width=32", "context=32"]
    quick += ["batch=8", f"data={_texts(tmp_path)}"]
    run.start("run", "pretrain", *(w for s in ("name=moved", *quick) for w in ("--set", s)))
    try:
        members = pool.wait(lambda ms: any(m["tokens_per_s"] for m in ms.values()))
        held = {(s["run"], s["stage"]) for m in members.values() for s in m["stages"]}
        assert held == {("moved", 0), ("moved", 1)}
        assert not members["spare-0"]["stages"], "a backup is not used where others are"
        (leaver,) = [
            m["provider"] for m in members.values() if {"run": "moved", "stage": 1} in m["stages"]
        ]
        assert leave(providers.pop(leaver)) == 0
        finished = run.finish(200)
    finally:
        run.kill()
    assert finished.code == 0, finished.err
    assert f"on the pool at {pool.address}" in finished.err
    assert "taken back" in finished.out + finished.err
    assert "Traceback" not in finished.err
    summary = (tmp_path / "fusion-runs" / "moved" / "summary.md").read_text()
    assert "80" in summary
    pool.wait_for("left", f"{leaver}-0")
    for provider in (*providers.values(), spare):
        assert leave(provider) == 0


def _texts(folder: Path) -> Path:
    texts = folder / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    return texts


def test_a_provider_comes_back_without_its_token(pool: Pool, token: str) -> None:
    once = pool.token("--uses", "1")
    assert leave_when_active(pool, pool.join("again", "--emulate", "cpu", token=once)) == 0
    assert leave_when_active(pool, pool.join("again", "--emulate", "cpu")) == 0
    replayed = pool.join("thief", "--emulate", "cpu", token=once).finish(60)
    assert replayed.code == 2
    assert "as often as it may be (1)" in replayed.err


def leave_when_active(pool: Pool, provider: Command) -> int:
    pool.wait_for("active", "again-0")
    return leave(provider)


def test_tokens_that_are_not_valid_are_refused_in_one_line(pool: Pool, token: str) -> None:
    short = pool.token("--expires", "1s")
    user = pool.token("--role", "user")
    poll(lambda: "expired" in pool.fusion("token", "list").out, 20)
    # The first letter of the fingerprint.
    damaged = token[:-52] + ("a" if token[-52] != "a" else "b") + token[-51:]
    wrong = re.sub(r"(fusion-\w+-)....", r"\1aaaa", token)
    for given, message in [
        (short, "has expired"),
        (wrong, "did not make token"),
        (damaged, "not the broker that made this token"),
        ("nonsense", "not a token"),
        (user, "that token is for a user"),
        (None, "no member of the pool"),
    ]:
        finished = pool.join("stranger", "--emulate", "cpu", token=given).finish(60)
        assert finished.code == 2, finished.err
        assert message in finished.err
        assert len(finished.error_lines) == 1
    closed = Command(folder=pool.folder, home=pool.folder / "elsewhere")
    closed.start("join", "127.0.0.1:9", "--token", token)
    assert "no Fusion broker answers" in closed.finish(60).err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "gpu9"], "no device of this machine"),
        (["--emulate", "rtx1"], "not in the catalogue"),
        (["--lend", "22-7"], "22:00-07:00"),
        (["--memory", "lots"], "8GB"),
        (["--memory", "8"], "was it meant as 8GB?"),
        (["--link", "1gbit/1ms"], "--emulate too"),
        (["--emulate", "cpu", "--devices", "cpu"], "exclude each other"),
        (["--name", "a b"], "--name"),
    ],
)
def test_bad_options_are_refused_before_the_broker_hears_of_them(
    tmp_path: Path, options: list[str], message: str
) -> None:
    command = Command(folder=tmp_path, home=tmp_path / "home")
    command.start("join", "127.0.0.1:9", *options)
    finished = command.finish(60)
    assert finished.code == 2
    assert message in finished.err


def test_a_revoked_provider_is_sent_away_and_told(pool: Pool) -> None:
    token = pool.token("--label", "bob")
    provider = pool.join("bob", "--emulate", "cpu", token=token)
    pool.wait_for("active", "bob-0")
    revoked = pool.fusion("token", "revoke", token.split("-")[1])
    assert "1 certificates" in revoked.out
    finished = provider.finish(90)
    assert finished.code == 1
    assert "may not join: " in finished.err
    assert "revoked" in finished.error_lines[-1]
    assert pool.status()["bob-0"]["state"] == "left"


def plain_text(port: int, path: str = "/health") -> int | None:
    """The status of an HTTP request without TLS; None where the connection just ends."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def test_strangers_and_plain_text_get_nothing(pool: Pool) -> None:
    (identity,) = [i for i in pools(pool.home) if i.role == "user"]
    context = ssl.create_default_context(cafile=str(identity.ca))
    api = http.client.HTTPSConnection("127.0.0.1", pool.ports[2], context=context, timeout=10)
    api.request("POST", "/api/flows/filter", "{}", {"content-type": "application/json"})
    assert api.getresponse().status == 401
    api.close()
    for port in pool.ports[:4]:
        assert plain_text(port) != 200
    # Nor does another user of this machine read the store past its front door.
    inner = {
        c.laddr.port
        for c in pool.service("store").net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    assert 401 in {plain_text(port, "/buckets/fusion/") for port in inner}
    assert not [p for p in inner if plain_text(p, "/buckets/fusion/") == 200]
    with (
        socket.create_connection(("127.0.0.1", pool.ports[1]), 10) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as stream,
        pytest.raises(ssl.SSLError, match=r"(?i)certificate required"),
    ):
        stream.recv(1)
    listening = {
        (c.laddr.ip, c.laddr.port)
        for process in marked(pool.mark)
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    assert {ip for ip, _ in listening} == {"127.0.0.1"}


def test_workers_come_back_when_the_scheduler_does(pool: Pool, token: str) -> None:
    provider = pool.join("steady", "--emulate", "cpu", token=token)
    before = pool.wait_for("active", "steady-0")["steady-0"]["address"]
    pool.service("scheduler").kill()
    pool.wait(lambda ms: "steady-0" in ms and ms["steady-0"]["address"] not in {before, ""})
    pool.wait_for("active", "steady-0")
    assert "scheduler ended" in pool.log
    assert leave(provider) == 0


def test_whatever_ends_the_command_ends_its_workers(pool: Pool, token: str) -> None:
    provider = pool.join("doomed", "--emulate", "cpu,cpu", token=token)
    pool.wait_for("active", "doomed-0", "doomed-1")
    assert len(workers_of(provider)) == 2
    assert provider.process is not None
    provider.process.kill()
    poll(lambda: not marked(provider.mark), 20)
    pool.wait_for("left", "doomed-0", "doomed-1")


def test_a_plain_dask_worker_onboards_the_same_way(pool: Pool, token: str, tmp_path: Path) -> None:
    assert leave_when_active(pool, pool.join("again", "--emulate", "cpu", token=token)) == 0
    (identity,) = pools(pool.folder / "provider-again" / "home")
    tls = [
        "--tls-ca-file",
        identity.ca,
        "--tls-cert",
        identity.certificate,
        "--tls-key",
        identity.key,
    ]
    options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1"]
    options += ["--dashboard-address", "127.0.0.1:0", "--name", "plain", "--local-directory"]
    command = [sys.executable, "-P", "-m", "distributed.cli.dask_worker", pool.scheduler, *options]
    command += [str(tmp_path), *map(str, tls), "--preload", "fusion_dask.worker"]
    environment = {**os.environ, "FUSION_PROBE_S": "0.2", "PYTHONPATH": os.pathsep.join(PACKAGES)}
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            profile = pool.wait_for("active", "plain")["plain"]["profile"]
            assert profile["flops_per_s"]["float32"] > 0
        finally:
            worker.terminate()
            worker.wait(30)


def test_doctor_finds_a_healthy_pool_and_names_what_is_not(pool: Pool, tmp_path: Path) -> None:
    healthy = pool.fusion("doctor", "--json")
    assert healthy.code == 0, healthy.out
    findings = {f["check"]: f["state"] for f in json.loads(healthy.out)}
    assert findings.keys() >= {"gateway", "scheduler", "prefect", "store", "clock", "certificate"}
    assert set(findings.values()) == {"ok"}
    gateway = pool.service("gateway")
    gateway.suspend()
    try:
        ill = pool.fusion("doctor")
    finally:
        gateway.resume()
    assert ill.code == 1
    assert re.search(r"FAIL gateway .*fusion up --port", ill.out)
    alone = Command(folder=tmp_path, home=tmp_path / "home")
    alone.start("doctor")
    finished = alone.finish(60)
    assert (finished.code, "member of no pool" in finished.out) == (0, True)


def prefect(pool: Pool, method: str, path: str, body: object = None) -> Any:
    """An answer of the pool's Prefect to its operator."""
    (identity,) = [i for i in pools(pool.home) if i.role == "user"]
    password = base64.b64encode(identity.secrets["PREFECT_API_AUTH_STRING"].encode()).decode()
    context = ssl.create_default_context(cafile=str(identity.ca))
    api = http.client.HTTPSConnection("127.0.0.1", pool.ports[2], context=context, timeout=30)
    headers = {"authorization": f"Basic {password}", "content-type": "application/json"}
    api.request(method, f"/api/{path}", None if body is None else json.dumps(body), headers)
    answer = api.getresponse()
    text = answer.read()
    api.close()
    assert answer.status in {200, 201}, text
    return json.loads(text)


def store(pool: Pool) -> Store:
    """The pool's store, as its operator."""
    (identity,) = [i for i in pools(pool.home) if i.role == "user"]
    return open_store(
        identity.store,
        key=identity.secrets["AWS_ACCESS_KEY_ID"],
        secret=identity.secrets["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=identity.secrets["AWS_ENDPOINT_URL"],
        client_kwargs={"verify": str(identity.ca)},
    )


def test_a_pool_survives_its_own_restarts(pool: Pool, token: str) -> None:
    broker = pool.home / "broker"
    kept = {name: (broker / name).read_bytes() for name in ("state.json", "authority/ca.pem")}
    assert store(pool).create("kept/object", b"weights")
    flow = prefect(pool, "POST", "flows/", {"name": "kept"})
    run = prefect(pool, "POST", "flow_runs/", {"flow_id": flow["id"], "name": "kept"})

    def assert_the_same() -> None:
        assert {name: (broker / name).read_bytes() for name in kept} == kept
        assert store(pool).read("kept/object") == b"weights"
        assert prefect(pool, "GET", f"flow_runs/{run['id']}")["name"] == "kept"
        assert pool.fusion("doctor").code == 0

    pool.supervisor().kill()
    poll(lambda: not marked(pool.mark), 20)
    assert token_of(pool.up()) == token
    assert_the_same()
    down = pool.fusion("down")
    assert down.code == 0
    assert str(broker) in down.out
    assert not marked(pool.mark)
    again = pool.fusion("down")
    assert (again.code, "no broker runs" in again.out) == (0, True)
    absent = pool.join("late", "--emulate", "cpu").finish(90)
    assert absent.code in {1, 2}
    assert token_of(pool.up()) == token
    assert_the_same()


def test_a_service_that_is_killed_comes_back_where_it_was(pool: Pool, token: str) -> None:
    killed = pool.service("gateway")
    killed.kill()
    poll(lambda: not killed.is_running() or killed.status() == psutil.STATUS_ZOMBIE, 10)
    # Whoever starts it "again" meanwhile is told when all of it answers.
    up = pool.fusion("up")
    assert (up.code, "is up already" in up.out) == (0, True)
    assert pool.service("gateway").pid != killed.pid
    assert leave_when_active(pool, pool.join("again", "--emulate", "cpu", token=token)) == 0
    assert "gateway ended with -9" in pool.log


def test_the_foreground_is_for_those_who_supervise(tmp_path: Path) -> None:
    pool = Pool(folder=tmp_path, mark=uuid.uuid4().hex)
    command = Command(folder=tmp_path, home=pool.home, mark=pool.mark)
    names = ("--port", "--scheduler-port", "--prefect-port", "--store-port", "--dashboard-port")
    pairs = zip(names, pool.ports, strict=True)
    options = [word for name, port in pairs for word in (name, str(port))]
    command.start("up", "--foreground", "--host", "127.0.0.1", *options)
    try:
        poll(lambda: pool.home.exists() and pool.fusion("doctor").code == 0, 120)
        assert "is up already" in pool.fusion("up").out
        command.send(signal.SIGTERM)
        finished = command.finish(60)
        assert (finished.code, f"fusion join {pool.address}" in finished.out) == (0, True)
        poll(lambda: not marked(pool.mark), 20)
    finally:
        command.kill()
