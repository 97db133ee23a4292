"""Hardware errors of NVIDIA's GPUs: uncorrected ECC errors, and the driver's Xid messages."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

from slurmft.core import process
from slurmft.plugins.examine.thresholds import XID_AGE_S

_QUERY_S = 10.0
_ECC_FIELDS = (
    "ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure"
)
# NVIDIA's numbers of the errors that no program makes by itself.
_XIDS = {
    48: "double-bit ECC error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "GSP time-out",
}


def find() -> tuple[str, ...]:
    """Returns the errors of this node's GPUs, in words."""
    # Side by side: where neither answers, they take one time limit, not two.
    with ThreadPoolExecutor() as threads:
        ecc = threads.submit(_query_ecc)
        xids = threads.submit(_query_xids)
        return (*ecc.result(), *xids.result())


def _query_ecc() -> list[str]:
    """Asks nvidia-smi for uncorrected errors, and for rows of memory that are to be remapped."""
    query = f"--query-gpu=index,{_ECC_FIELDS}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    printed = process.output(command, _QUERY_S)
    if printed is None:
        return ["nvidia-smi fails, or does not answer"]
    return parse_ecc(printed)


def parse_ecc(printed: str) -> list[str]:
    """Reads nvidia-smi's lines "index, uncorrected errors, remapping pending, remapping failed".

    A GPU without ECC has "[N/A]" there.
    """
    problems = []
    for line in printed.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4:  # a warning of the driver
            continue
        index, count, pending, failed = fields
        if count.isdigit() and int(count) > 0:
            errors = f"{count} uncorrected ECC error(s)"
            problems.append(f"GPU {index} has {errors} since it was reset")
        if pending == "Yes":
            problems.append(f"GPU {index} needs a reset: rows are to be remapped")
        if failed == "Yes":
            problems.append(f"GPU {index}: its memory cannot be remapped any more")
    return problems


def _query_xids() -> list[str]:
    # Some systems let only root read the kernel's messages. Then there are none.
    log = process.output(["dmesg", "--facility=kern"], _QUERY_S) or ""
    return parse_xids(log, time.clock_gettime(time.CLOCK_BOOTTIME))


def parse_xids(log: str, now_s: float) -> list[str]:
    """Reads lines of dmesg such as "[12345.67] NVRM: Xid (PCI:0000:17:00): 79, ...".

    Args:
        now_s: seconds since the system's start, as the times of the lines.
    """
    lines = re.findall(
        r"^\[\s*([\d.]+)\] NVRM: Xid \(PCI:(\S+?)\): (\d+)",
        log,
        re.MULTILINE,
    )
    # A set: the driver may write the same message again and again.
    recent = set()
    for when_s, bus, xid in lines:
        if int(xid) in _XIDS and float(when_s) > now_s - XID_AGE_S:
            recent.add((bus, int(xid)))
    problems = []
    for bus, xid in sorted(recent):
        meaning = _XIDS[xid]
        problems.append(f"GPU at {bus}: Xid {xid}, {meaning}")
    return problems
