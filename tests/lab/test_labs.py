"""What slurmft believes of a file system is what holds there. With --lab; as root."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurmft.cluster import wait
from slurmft.runs import attempts
from tests.lab import checks
from tests.lab.bench import Bench, bench
from tests.lab.checks import Found
from tests.lab.labs import LABS, Lab, make
from tests.locks.test_lockfs import KINDS

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=sorted(LABS))
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with make(request.param) as started:
        yield started


@pytest.fixture
def clients(lab: Lab) -> Iterator[Bench]:
    with bench(lab) as made:
        yield made


def test_the_probe_is_right_and_chooses_a_lock_that_holds(clients: Bench) -> None:
    found = checks.check_locks(clients)
    for kind in KINDS:
        holds, probed = found["holds"][kind], found["probe"][kind]
        assert bool(holds.get("error")) == bool(probed["error"]), kind
        if not probed["error"]:
            assert probed["on_node"] == holds["on_node"], kind
            assert probed["between_nodes"] == holds["between_nodes"], kind
        if probed["between_nodes"]:
            assert probed["on_exit"] == (holds["exit_s"] is not None), kind
            assert probed["on_kill"] == (holds["kill_s"] is not None), kind
    choice = found["choice"]
    if choice in KINDS:
        holds = found["holds"][choice]
        assert holds["between_nodes"]
        assert None not in (holds["exit_s"], holds["kill_s"])
    elif choice != "soft":
        assert "no kind of file lock holds" in choice


def test_shared_caches_are_filled_once_and_metrics_are_right(clients: Bench) -> None:
    holds = checks.check_locks(clients)["holds"]
    found = checks.check_traps(clients)

    def good(kind: str) -> bool:
        hub = found["hub"][kind]
        return bool(
            found["evaluate"][kind] == found["right"]
            and (hub["fetched"], hub["problems"]) == (1, [])
        )

    if "measured" in found["kinds"]:
        assert good("measured")
    # Without a measurement the shim uses lockf, as all others do who have not measured.
    assert good("unmeasured") == bool(holds["lockf"].get("between_nodes"))
    # The trap that the shim is there for. (By flock alone, NFS also fetches twice where it holds.)
    if not holds["flock"].get("between_nodes"):
        assert not good("flock")


def test_a_file_that_is_replaced_is_never_half_nor_absent(clients: Bench) -> None:
    seen = checks.check_renames(clients)["slurmft"]
    assert seen["reads"]
    assert (seen["torn"], seen["errors"]) == (0, {})


def test_one_client_is_the_first_to_create_a_name(clients: Bench) -> None:
    for kind, found in checks.check_exclusive(clients).items():
        assert (found["both"], found["none"]) == (0, 0), kind


def test_what_is_written_is_seen_before_slurmft_gives_up(clients: Bench) -> None:
    found = checks.check_visibility(clients, times=5)
    for what in ("looked for", "listed", "changed", "appended"):
        seconds = found[what]
        assert isinstance(seconds, list), f"{what}: {seconds}"
        assert max(seconds) < min(attempts._FILE_LAG_S, wait._FILE_LAG_S), what


def test_checkpoint_while_the_server_is_down(clients: Bench) -> None:
    found = checks.check_restart(clients)
    assert found["midway"]
    assert_whole(found["seen"], {1}, found["writer"], 2)
    assert found["again"] == "written"


def test_run_while_the_server_is_down(clients: Bench) -> None:
    found = checks.check_run(clients)
    assert found["finished"], found["words"]
    assert found["steps_lost"] == 0


def test_checkpoint_where_the_quota_is_full(lab: Lab, clients: Bench) -> None:
    found = checks.check_quota(clients)
    if "not shown" in found:
        pytest.skip(found["not shown"])
    assert found["small"]["error"] is None
    # its clients count for themselves
    assert found["full"]["error"] or lab.name == "cephfs"
    assert (found["full"]["error"] or "EDQUOT").split(":")[0] in ("EDQUOT", "ENOSPC")
    assert found["leftovers"] == []
    assert_whole(found["seen"], {1}, found["full"], 2)
    assert found["again"]["error"] is None


def test_checkpoint_of_a_client_that_loses_its_network(clients: Bench) -> None:
    found = checks.check_cut(clients)
    assert found["taken"] == "got"
    assert_whole(found["seen"], set(), found["writer"], 1)


def assert_whole(
    seen: dict[str, str], before: set[int], writer: Found, step: int
) -> None:
    """All checkpoints that are visible are whole, and those whose writer knows no error are."""
    steps = before | ({step} if writer["error"] is None else set())
    assert {f"step-{n:08d}" for n in steps} <= set(seen)
    assert set(seen.values()) <= {"whole"}
