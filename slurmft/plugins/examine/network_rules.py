"""Rules about the network: names, ports, clocks, links. Pure functions."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from slurmft.core.text import some
from slurmft.node.hardware import Network
from slurmft.plugins.examine import thresholds
from slurmft.plugins.examine.checks import Check, failure, ok, warning
from slurmft.plugins.examine.comparison import (
    Blame,
    Pair,
    blame,
    by_value,
    shares_of_median,
)
from slurmft.plugins.examine.report import LinkReport
from slurmft.plugins.examine.thresholds import CLOCK_SKEW_S

Links = Mapping[str, Mapping[str, LinkReport]]
"""From -> to -> the connections."""

# Purpose of a port -> words for what needs it, and for a port.
_USES = {
    "rendezvous": ("torchrun's store needs", "a rendezvous port"),
    "ephemeral": ("collectives need", "an ephemeral port"),
}
# An interface is worth a hint if it is so many times faster than the one in use.
_FASTER = 1.5


def fabric(
    networks: Mapping[str, Sequence[Network]], chosen: Mapping[str, str | None]
) -> list[Check]:
    """Checks which interface a run's collectives use, and that no better one is there.

    Args:
        networks: node -> its interfaces, the fastest first.
        chosen: node -> the interface that would be used; None for any.
    """
    used = {}
    better = {}
    for node, name in chosen.items():
        network = _of_name(networks[node], name)
        # Simulated nodes use loopback, which is not among the networks.
        used[node] = str(network or name or "any")
        if not networks[node] or name is None:
            continue
        best = networks[node][0]
        # The speed is 0 where the kernel does not know it.
        speed_mbit_s = network.speed_mbit_s if network else 0
        is_faster = speed_mbit_s > 0 and best.speed_mbit_s > _FASTER * speed_mbit_s
        if best.name != name and (best.infiniband or is_faster):
            better[node] = str(best)
    text = f"collectives use {by_value(used)}"
    if better:
        hint = "--interface NAME, or --host-suffix where the fabric has host names of its own"
        text += f"; faster interfaces are up: {by_value(better)}"
        return [warning("fabric", text, hint)]
    return [ok("fabric", text, **used)]


def _of_name(networks: Sequence[Network], name: str | None) -> Network | None:
    for network in networks:
        if network.name == name:
            return network
    return None


# --- names and ports ------------------------------------------------------------------------------


def tried_pairs(links: Links) -> set[Pair]:
    """Returns the pairs of which one has tried to reach the other."""
    pairs = set()
    for start, goals in links.items():
        for goal in goals:
            pairs.add((start, goal))
    return pairs


def broken_pairs(links: Links) -> set[Pair]:
    """Returns the pairs of which one does not resolve, or not reach, the other."""
    pairs: set[Pair] = set()
    for reason_of in _reasons(links).values():
        pairs |= reason_of.keys()
    return pairs


def _reasons(links: Links) -> dict[str, dict[Pair, str]]:
    """Returns "name", or the purpose of a port -> pair -> the reason why it is broken."""
    reasons: dict[str, dict[Pair, str]] = {}
    for start, goals in links.items():
        for goal, link in goals.items():
            reason_of = {"name": link.problem, **link.ports}
            for kind, reason in reason_of.items():
                if reason is not None:
                    reasons.setdefault(kind, {})[start, goal] = reason
    return reasons


def usable(nodes: Sequence[str], links: Links) -> list[str]:
    """Returns the nodes that are left without those to blame for broken pairs."""
    blames = blame(tried_pairs(links), broken_pairs(links))
    blamed_hosts = {each.host for each in blames}
    return [node for node in nodes if node not in blamed_hosts]


def reach(links: Links) -> list[Check]:
    """Checks that the nodes resolve each other's names and reach each other's ports."""
    tried = tried_pairs(links)
    if not tried:
        return []
    reasons = _reasons(links)
    checks: list[Check] = []
    if "name" not in reasons:
        checks.append(ok("names", f"all {len(links)} nodes resolve each other's names"))
    for kind, reason_of in reasons.items():
        if tried == set(reason_of):
            # Nothing works: that is no single host's fault.
            text = f"{some(list(links))} cannot {_verb(kind)} each other"
            checks.append(_unreached(kind, text, list(reason_of.values())))
            continue
        # A name that one host cannot resolve is that host's fault, not the other's.
        suspects_start = kind == "name"
        for each in blame(tried, reason_of, suspects_start=suspects_start):
            checks += _blame_checks(kind, each, reason_of)
    if not reasons:
        pairs = "pairs"
        # The ring of many nodes leaves pairs out.
        pair_count = len(links) * (len(links) - 1)
        if len(tried) != pair_count:
            pairs = f"{len(tried):,} pairs that were tried"
        text = f"all {pairs} reach each other, on rendezvous and on ephemeral ports"
        checks.append(ok("ports", text))
    return checks


def _blame_checks(
    kind: str,
    each: Blame,
    reason_of: Mapping[Pair, str],
) -> Iterator[Check]:
    """Writes a check for either direction in which the blamed host has broken pairs."""
    host = each.host
    end = "; both reach other nodes" if each.is_link else ""
    if each.cannot_reach:
        text = f"{some(each.cannot_reach)} cannot {_verb(kind)} it"
        reasons = [reason_of[other, host] for other in each.cannot_reach]
        yield replace(_unreached(kind, text, reasons, end), hosts=(host,))
    if each.unreached:
        text = f"cannot {_verb(kind)} {some(each.unreached)}"
        reasons = [reason_of[host, other] for other in each.unreached]
        yield replace(_unreached(kind, text, reasons, end), hosts=(host,))


def _verb(kind: str) -> str:
    return "resolve" if kind == "name" else "reach"


def _unreached(kind: str, text: str, reasons: Sequence[str], end: str = "") -> Check:
    """Writes a check of a broken name or port.

    Args:
        text: who cannot reach whom.
    """
    # Each reason once: many hosts have the same.
    distinct_reasons = dict.fromkeys(reasons)
    why = ", ".join(distinct_reasons) + end
    if kind == "name":
        hint = "check /etc/hosts or the name service; --host-suffix if the fabric has its own names"
        return failure("names", f"{text}: {why}", hint)
    user, port = _USES[kind]
    hint = f"a firewall or a bad cable? {user} {kind} ports that are open between nodes"
    return failure("ports", f"{text} on {port}: {why}", hint)


# --- clocks ---------------------------------------------------------------------------------------


def clocks_of_links(links: Links) -> list[Check]:
    """Compares each clock with those of the nodes that reached its node. These are right unless
    most of them are wrong."""
    offsets: dict[str, list[tuple[float, float]]] = {}
    for start, goals in links.items():
        for goal, link in goals.items():
            # A node that reaches itself compares its clock with itself.
            if link.ahead_s is not None and goal != start:
                # `ahead_s` takes both ways for equally long: if one took no time at all, it is off
                # by half the round trip.
                offset = (link.ahead_s, link.round_trip_s / 2)
                offsets.setdefault(goal, []).append(offset)
    # The median: one wrong clock among the others does not shift it.
    medians = {}
    for node, seen_by_others in offsets.items():
        middle = len(seen_by_others) // 2
        medians[node] = sorted(seen_by_others)[middle]
    return clocks(medians)


def clocks(offsets: Mapping[str, tuple[float, float]]) -> list[Check]:
    """Checks the clocks.

    Args:
        offsets: node -> (how far its clock is ahead of the others, how uncertain that is), in s.
    """
    if not offsets:
        return []
    checks = []
    for node, (ahead_s, uncertainty_s) in offsets.items():
        # On a slow network nobody knows: such a clock passes.
        least_s = abs(ahead_s) - uncertainty_s
        if least_s <= CLOCK_SKEW_S.warning:
            continue
        way = "ahead of" if ahead_s > 0 else "behind"
        text = f"its clock is {abs(ahead_s):.1f} s {way} the others "
        text += f"(give or take {uncertainty_s:.3f} s)"
        hint = "tell the site: the time service (chrony, ntpd) may not run there"
        kind = failure if least_s > CLOCK_SKEW_S.failure else warning
        checks.append(kind("clocks", text, hint, hosts=[node], off_s=ahead_s))
    if checks:
        return checks
    most_s = max(abs(ahead_s) for ahead_s, _ in offsets.values())
    most_ms = 1000 * most_s
    return [ok("clocks", f"within {most_ms:.1f} ms", most_s=most_s)]


# --- speed of links -------------------------------------------------------------------------------


def links(rates: Mapping[Pair, float]) -> Iterator[Check]:
    """Checks the links between neighbours.

    Args:
        rates: pair -> bytes per second.
    """
    if not rates:
        return
    # A node is as fast as its best link: a slow neighbour slows down the other ones.
    best: dict[str, float] = {}
    for pair, rate in rates.items():
        for node in pair:
            best[node] = max(rate, best.get(node, 0.0))
    median = statistics.median_high(best.values())
    slow_nodes = set()
    for node, share in shares_of_median(best).items():
        if share < thresholds.NODE_LINK:
            slow_nodes.add(node)
            text = f"all its links are slow: {_gbit(best[node])}, {share:.0%} of the median"
            hint = "exclude it and tell the site: its cable, port or driver may be bad"
            yield warning("links", text, hint, hosts=[node], bytes_s=best[node])
    for (start, goal), rate in rates.items():
        # A link of a slow node is slow because of the node, which is named already.
        has_slow_node = start in slow_nodes or goal in slow_nodes
        if has_slow_node or rate >= thresholds.SINGLE_LINK * median:
            continue
        share = rate / median
        text = f"{start} to {goal} is slow: "
        text += f"{_gbit(rate)}, {share:.0%} of the median; "
        text += "both are fast with other nodes"
        hint = "tell the site: what lies between these two may be bad, or busy"
        yield warning("links", text, hint, bytes_s=rate)
    least = min(best.values())
    text = f"one TCP connection carries {_gbit(median)} "
    text += f"(median of {len(best)} nodes; least {_gbit(least)})"
    yield ok("links", text, median_bytes_s=median)


def _gbit(bytes_s: float) -> str:
    return f"{8 * bytes_s / 1e9:.3g} Gbit/s"
