"""How this node is prepared for the ranks of a run: its profile, and the variables of the ranks."""

from collections.abc import Mapping

from slurmft.core import interpreter
from slurmft.core.config import RunConfig
from slurmft.core.program import kind_of
from slurmft.node import ccl, flight_recorder, hardware, profiles
from slurmft.node.hardware import host_name
from slurmft.node.profiles import Profile
from slurmft.node.rendezvous import LISTEN, LOCAL_NODE, Rendezvous

# How long torchrun waits between SIGTERM and SIGKILL to the ranks of a failed node.
_STOP_TIMEOUT_S = 5


def use_of_node(
    config: RunConfig,
    environment: Mapping[str, str],
    for_rank: bool = False,
    is_bound: bool = False,
) -> Profile:
    """Decides how a run uses this node. `for_rank` and `is_bound`: see `profiles.choose`.

    Raises:
        UsageError: the node does not have what was asked for.
    """
    node_hardware = hardware.detect(environment)
    python = kind_of(config.program).python
    ccl.check(config.job.backend, python, f" on {host_name()}")
    part = None
    if LOCAL_NODE in environment:  # a simulated node: it has a part of this machine
        part = (int(environment[LOCAL_NODE]), config.job.nodes)
    return profiles.choose(
        node_hardware,
        config.job,
        uses_ccl=config.job.backend == "ccl",
        part=part,
        for_rank=for_rank,
        is_bound=is_bound,
    )


def training_environment(
    profile: Profile,
    rendezvous: Rendezvous,
    environment: Mapping[str, str],
    python: str = interpreter.PYTHON,
) -> dict[str, str]:
    """Returns the environment of torchrun and its processes.

    Variables that the user has set take precedence over what is found here, but not over flags.

    Args:
        python: that of the program, whose packages count.
    """
    variables = profiles.merge(profile.settings(), environment)
    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_STOP_TIMEOUT_S)
    variables |= flight_recorder.variables(environment)
    address = rendezvous.listen_address()
    variables[LISTEN] = ""
    if address:
        variables[LISTEN] = f"{rendezvous.host}={address}"
    interface_variables = _interface_variables(
        rendezvous.socket_interface(), profile.uses_ccl
    )
    variables |= interface_variables
    if profile.uses_ccl and rendezvous.has_several_nodes:
        variables |= ccl.NETWORK_VARIABLES
    variables |= environment
    if rendezvous.interface is not None:  # the flag --interface
        variables |= interface_variables
    if profile.uses_ccl and (binding := ccl.find(python)):
        variables |= binding.environment()
    return variables


def _interface_variables(interface: str | None, uses_ccl: bool) -> dict[str, str]:
    """Returns the variables that bind collectives to a network interface."""
    if interface is None:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": interface}
    variables["NCCL_SOCKET_IFNAME"] = f"={interface}"  # a bare name would be a prefix
    if uses_ccl:
        variables |= ccl.interface_variables(interface)
    return variables
