"""The partition problem of MG-WFBP and iBatch: which layers share a message, given the measured times of a job.

Both papers overlap a chain of layer computations with messages, one for each contiguous group of layers. PyTorch calls
such a group a bucket. The measured times of a job are its *profile*.

* push (MG-WFBP, section II.C): backward computes layers L..1. A group is sent once its lowest layer is computed and the
  network is free (Eq. 6, 7, 20).
* pull (iBatch, "Problem Formulation"): groups arrive in the order 1..L, one after another. A layer is computed once its
  group has arrived and the layer before it is computed.

A layer computes for c seconds, and a message of layers i..j takes `startup + sum(transfer[i..j])`. If the two
recurrences are unrolled, both give the same longest path. For groups g_1, .., g_K in layer order,

    makespan = max over k of  comm(g_1) + .. + comm(g_k)  +  compute(g_k) + .. + compute(g_K).

A pull reads this formula from left to right, a push from right to left in reversed time. Hence every strategy for one
direction is also a strategy for the other, and one exact planner serves both.

The profile of a job has the compute times of its layers and the costs of its network. Its JSON file:

{"layers": [{"name", "parameters", "forward_s", "backward_s"}, ...] in forward order,
 "network": {"a", "b", "collective": "allreduce" (the default), "ring" or "servers"}
            or {"alpha", "beta", "gamma", "collective": "ring"},
 "startup_s": T_s, "bandwidth_Bps": bytes/s, "nodes": optional, the size at which a and b were measured}

Times are in seconds, sizes in bytes. A parameter has 4 bytes (float32). `network` gives the time of an allreduce of M
bytes, or of a push to servers, as t = a + b M (MG-WFBP, Eq. 9). `startup_s` and `bandwidth_Bps` give the time of one
push or pull of a parameter server as T_s + M / bandwidth (iBatch, "Problem Formulation"). The costs at another number
of nodes can be computed only for a ring. A store without servers does not sum by a ring, so a measured profile says
"allreduce".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpips.collectives import files

# the first and the last layer of a group that shares a message, both inclusive, counted from 1
Group = tuple[int, int]
# contiguous groups that cover the layers 1..L, in layer order
Groups = tuple[Group, ...]


# "shared": pushes and pulls share one link; "duplex": pushes have one link, and pulls another
Link = Literal["shared", "duplex"]


class JointPlan(NamedTuple):
    """The groups of both directions (see `joint`).

    Attributes:
        push: Groups of the layers 1..L.
        early: How many of the last push groups are pulled right after their push.
        pull: Groups of the layers below the early groups, pulled after the last push.
    """

    push: Groups
    early: int
    pull: Groups

    @property
    def first_early_layer(self) -> int:
        """The lowest layer that is pulled early, or L + 1 if no layer is."""
        return self.push[-self.early][0] if self.early else self.push[-1][1] + 1


class Problem(NamedTuple):
    """The times of one direction, layers in forward order. `of` makes a problem from any sequences and checks them.

    Attributes:
        compute: float64 (L,), seconds of backward (for push) or forward (for pull) of each layer.
        startup: Seconds that every message costs (MG-WFBP's a, iBatch's T_s).
        transfer: float64 (L,), seconds that each layer's bytes add to its message (MG-WFBP's b M, iBatch's T_t).
    """

    compute: NDArray[np.float64]
    startup: float
    transfer: NDArray[np.float64]

    @classmethod
    def of(cls, compute: ArrayLike, startup: float, transfer: ArrayLike) -> Problem:
        """Return a problem from two sequences of equal, positive length. Raises ValueError otherwise."""
        c, t = np.asarray(compute, np.float64), np.asarray(transfer, np.float64)
        if c.ndim != 1 or c.shape != t.shape or not len(c):
            raise ValueError(
                f"compute has shape {c.shape}, transfer {t.shape}: give two lists of one length, at least 1"
            )
        return cls(c, float(startup), t)

    @property
    def layers(self) -> int:
        return len(self.compute)


def sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return prefix sums with a leading zero: layers i..j (1-based) add up to `sums[j] - sums[i - 1]`."""
    return np.concatenate(([0.0], np.cumsum(values)))


def from_ends(ends: Iterable[int]) -> Groups:
    """Return the groups whose last layers are `ends`, ascending (iBatch's l_1, .., l_N)."""
    groups, first = [], 1
    for last in ends:
        groups.append((first, last))
        first = last + 1
    return tuple(groups)


def shown(group: Group) -> str:
    """Format a group as "3" or "3-5"."""
    first, last = group
    return str(first) if first == last else f"{first}-{last}"


def message_times(problem: Problem, groups: Groups) -> NDArray[np.float64]:
    """Return the seconds of every group's message, in layer order."""
    total = sums(problem.transfer)
    return np.array([problem.startup + total[last] - total[first - 1] for first, last in groups])


def makespan(problem: Problem, groups: Groups) -> float:
    """Return the seconds from the start of the first task to the end of the last, the same for push and for pull.

    The docstring of the module has the formula.

    >>> problem = mpips.overlap.Problem.of(compute=[2.0, 4.0], startup=0.5, transfer=[0.4, 1.6])
    >>> mpips.overlap.makespan(problem, ((1, 2),))  # all layers in one message: 6 s of compute, then 2.5 s
    8.5
    """
    compute = sums(problem.compute)
    begun = np.array([compute[first - 1] for first, _ in groups])
    return float(np.max(np.cumsum(message_times(problem, groups)) + compute[-1] - begun))


PARAMETER_BYTES = 4
_TIMES = ("forward_s", "backward_s")
# limit of all numbers in a profile, so that no sum or product overflows
LARGEST = 10**18


@dataclass(frozen=True)
class Layer:
    """One learnable layer. A layer without parameters belongs to the layer before it, as in iBatch's case study."""

    name: str
    parameters: int
    forward_s: float
    backward_s: float


Collective = Literal["allreduce", "servers", "ring"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


@dataclass(frozen=True)
class LinearNetwork:
    """An allreduce, or a push to servers, of M bytes takes a + b M seconds on `nodes` nodes.

    Attributes:
        nodes: The number of nodes at which a and b were measured. None if unknown; a and b then hold for every number.
        collective: "ring" if the allreduce is known to be a ring, "allreduce" for any algorithm, "servers" for a push.
    """

    a: float
    b: float
    nodes: int | None = None
    collective: Collective = "allreduce"

    def at(self, nodes: int | None) -> tuple[float, float]:
        """Return (a, b) for another number of nodes N, as for a ring: a ~ N - 1, b ~ (N - 1) / N.

        Raises ValueError if a and b cannot be computed: from one node, which has no network; for pushes to servers; and
        for an allreduce that may not be a ring.
        """
        if nodes is None or nodes == self.nodes:
            return self.a, self.b
        if self.collective == "servers":
            measured = "" if self.nodes is None else f"measured on {self.nodes}, "
            raise ValueError(
                f"network: a and b are those of a push to servers, which do not scale as a ring does: "
                f"{measured}they say nothing of {nodes} nodes; plan without --nodes"
            )
        if self.nodes == 1:
            raise ValueError(
                f"network: a and b were measured on 1 node, which says nothing of a network of {nodes}: "
                "plan without --nodes, or measure a profile on at least 2"
            )
        if self.nodes is None:
            return self.a, self.b
        if self.collective != "ring":
            raise ValueError(
                f"network: a and b were measured on {self.nodes} nodes with an allreduce that need not be "
                f"a ring, so they say nothing of {nodes}: plan without --nodes, or give network "
                '"collective": "ring" if it is one'
            )
        ratio = (nodes - 1) / (self.nodes - 1)
        return self.a * ratio, self.b * ratio * self.nodes / nodes


@dataclass(frozen=True)
class RingNetwork:
    """A ring allreduce, described by the costs of a link (MG-WFBP, section II.D).

    alpha is the startup in s, beta the transfer in s/B, and gamma the sum in s/B. An allreduce of M bytes on N nodes
    takes a + b M seconds, with a = 2 (N - 1) alpha and b = 2 (N - 1) / N beta + (N - 1) / N gamma.
    """

    alpha: float
    beta: float
    gamma: float

    def at(self, nodes: int | None) -> tuple[float, float]:
        if nodes is None:
            raise ValueError("network alpha, beta, gamma give a ring's time only for a number of nodes: say how many")
        share = (nodes - 1) / nodes
        return 2 * (nodes - 1) * self.alpha, share * (2 * self.beta + self.gamma)


Network = LinearNetwork | RingNetwork
# MG-WFBP's cluster on 10 Gbit/s Ethernet.
# alpha: from section II.D, where 2 (N - 1) alpha = 90.52, 271.56, 633.64 us on 2, 4, 8 nodes.
# beta: from the authors' simulator.
# gamma: the simulator's 2.5e-9 s, which we take for the time to add one 4-byte number.
TEN_GIGABIT = RingNetwork(alpha=45.26e-6, beta=1.2 / (9 * 2**30 / 8), gamma=2.5e-9 / 4)


@dataclass(frozen=True)
class Profile:
    """The numbers of a job that a planner needs.

    `create_profile`, `profile_from_dict` and `load_profile` make profiles and check them.
    """

    layers: tuple[Layer, ...]
    network: Network
    startup_s: float
    bandwidth_Bps: float

    def push(self, nodes: int | None = None) -> Problem:
        """Return the partition problem of the backward pass, which overlaps with sending gradients (MG-WFBP).

        Layers compute their gradients while the network sums gradients of other layers, by an allreduce or through
        servers. Gradients leave the worker, hence the name; `pull` is the problem of parameters that arrive.

        Args:
            nodes: The number of nodes of the job. None: the number at which the costs of the network were measured.

        Raises:
            ValueError: The costs of the network are unknown for this number of nodes. A `RingNetwork` always needs
                `nodes`.
        """
        a, b = self.network.at(nodes)
        return Problem.of([x.backward_s for x in self.layers], a, b * self.nbytes)

    def pull(self) -> Problem:
        """Return the partition problem of the forward pass, which overlaps with pulling parameters (iBatch).

        The layers whose parameters have arrived compute, while the parameters of later layers arrive from servers.
        """
        return Problem.of([x.forward_s for x in self.layers], self.startup_s, self.nbytes / self.bandwidth_Bps)

    @property
    def nbytes(self) -> np.ndarray:
        """Bytes of every layer, float64 (L,)."""
        return PARAMETER_BYTES * np.array([x.parameters for x in self.layers], np.float64)

    @property
    def forward_s(self) -> float:
        return math.fsum(x.forward_s for x in self.layers)

    @property
    def backward_s(self) -> float:
        return math.fsum(x.backward_s for x in self.layers)

    def with_compute(self, forward_s: NDArray[np.float64], backward_s: NDArray[np.float64]) -> Profile:
        """Return a copy of the profile in which the layers have these compute times, float64 (L,) in seconds."""
        times = zip(self.layers, forward_s.tolist(), backward_s.tolist(), strict=True)
        return replace(self, layers=tuple(replace(layer, forward_s=f, backward_s=b) for layer, f, b in times))

    def with_network(self, push: tuple[float, float], pull: tuple[float, float], nodes: int) -> Profile:
        """Return a copy of the profile with other costs of messages. Its network must be a `LinearNetwork`.

        Args:
            push: The seconds that a push (an allreduce, or a push to servers) takes at any size, and the seconds that
                each byte adds.
            pull: The same for a pull from servers.
            nodes: The number of nodes at which these costs were measured.
        """
        assert isinstance(self.network, LinearNetwork)
        network = LinearNetwork(*push, nodes, self.network.collective)
        return replace(self, network=network, startup_s=pull[0], bandwidth_Bps=bandwidth(pull[1]))


def bandwidth(per_byte_s: float) -> float:
    """Return bytes a second for seconds a byte. The result is finite even if a byte takes no measurable time."""
    return 1 / max(per_byte_s, 1e-15)


def create_profile(
    names: Sequence[str],
    parameters: Sequence[int],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    network: Network,
    startup_s: float,
    bandwidth_Bps: float,
) -> Profile:
    """Return a checked profile. Arguments for each layer are sequences of one length, in forward order.

    Args:
        names: The names of the layers.
        parameters: The number of parameters of each layer.
        forward_s: The seconds of each layer in a forward pass.
        backward_s: The seconds of each layer in a backward pass.
        network: What an allreduce costs, or a push to servers: a `LinearNetwork` or a `RingNetwork`.
        startup_s: The seconds that every push or pull of a parameter server takes, however short it is.
        bandwidth_Bps: The bytes a second that a push or pull transfers.

    Raises:
        ValueError: A sequence or value is wrong; the message names it.

    >>> network = mpips.overlap.LinearNetwork(a=0.1, b=1e-3)
    >>> profile = mpips.overlap.create_profile(["a", "b"], [100, 400], [1.0, 2.0], [2.0, 4.0], network, 0.5, 1e3)
    >>> profile.nbytes.tolist()
    [400.0, 1600.0]
    """
    columns = {"names": names, "parameters": parameters, "forward_s": forward_s, "backward_s": backward_s}
    if len({len(column) for column in columns.values()}) != 1:
        lengths = ", ".join(f"{name} has {len(column)}" for name, column in columns.items())
        raise ValueError(f"columns of a profile need one length: {lengths}")
    rows = zip(names, parameters, forward_s, backward_s)
    layers = [dict(zip(("name", "parameters", *_TIMES), row)) for row in rows]
    return profile_from_dict(
        {
            "layers": layers,
            "network": _network_dict(network),
            "startup_s": startup_s,
            "bandwidth_Bps": bandwidth_Bps,
            **_nodes_dict(network),
        }
    )


def profile_from_dict(data: object) -> Profile:
    """Return a profile from parsed JSON, whose form the docstring of the module shows.

    Raises ValueError that names the wrong entry.

    >>> layer = {"name": "a", "parameters": 100, "forward_s": 1.0, "backward_s": 2.0}
    >>> data = {"layers": [layer], "network": {"a": 0.1, "b": 1e-3}, "startup_s": 0.5, "bandwidth_Bps": 1000}
    >>> mpips.overlap.profile_from_dict(data).backward_s
    2.0
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a profile is a JSON object, not {type(data).__name__}")
    _known(data, "profile", {"layers", "network", "startup_s", "bandwidth_Bps", "nodes"})
    rows = _get(data, "profile", "layers")
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise ValueError("profile: layers must be a list of at least one layer")
    layers = tuple(_layer(row, index) for index, row in enumerate(rows))
    nodes = data.get("nodes")
    if nodes is not None and (not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= LARGEST):
        raise ValueError(f"profile: nodes is {_shown(nodes)}, not a number of nodes")
    bandwidth = _number(data, "profile", "bandwidth_Bps")
    if bandwidth < 1 / LARGEST:
        raise ValueError(f"profile: bandwidth_Bps is {bandwidth}: give bytes per second")
    network = _network(_get(data, "profile", "network"), nodes)
    return Profile(layers, network, _number(data, "profile", "startup_s"), bandwidth)


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """Return the profile as data for JSON, from which `profile_from_dict` makes it again.

    >>> network = mpips.overlap.LinearNetwork(a=0.1, b=1e-3)
    >>> profile = mpips.overlap.create_profile(["a"], [100], [1.0], [2.0], network, 0.5, 1e3)
    >>> mpips.overlap.profile_from_dict(mpips.overlap.profile_to_dict(profile)) == profile
    True
    """
    layers = [vars(layer).copy() for layer in profile.layers]
    return {
        "layers": layers,
        "network": _network_dict(profile.network),
        "startup_s": profile.startup_s,
        "bandwidth_Bps": profile.bandwidth_Bps,
        **_nodes_dict(profile.network),
    }


def load_profile(path: str | Path) -> Profile:
    """Return the profile in a JSON file that `save_profile` or another program has written.

    Raises OSError if the file cannot be read, or ValueError that names the file and the wrong entry.

    >>> network = mpips.overlap.LinearNetwork(a=0.1, b=1e-3)
    >>> profile = mpips.overlap.create_profile(["a"], [100], [1.0], [2.0], network, 0.5, 1e3)
    >>> mpips.overlap.save_profile(profile, folder / "job.json")
    >>> mpips.overlap.load_profile(folder / "job.json") == profile
    True
    """
    try:
        return profile_from_dict(json.loads(Path(path).read_text(encoding="utf-8-sig")))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file, so no profile in JSON") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); a profile is a JSON object with layers and network") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write the profile to a file as JSON. Raises OSError if it cannot be written.

    >>> network = mpips.overlap.LinearNetwork(a=0.1, b=1e-3)
    >>> profile = mpips.overlap.create_profile(["a"], [100], [1.0], [2.0], network, 0.5, 1e3)
    >>> mpips.overlap.save_profile(profile, folder / "job.json")
    """
    files.write(path, json.dumps(profile_to_dict(profile), indent=1).encode() + b"\n")


def _layer(row: object, index: int) -> Layer:
    where = f"layers[{index}]"
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is {row!r}, not an object with name, parameters, forward_s, backward_s")
    name = _get(row, where, "name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: name is {name!r}, not a non-empty string")
    where = f"{where} ({name})"
    _known(row, where, {"name", "parameters", *_TIMES})
    parameters = _number(row, where, "parameters")
    if parameters != int(parameters):
        raise ValueError(f"{where}: parameters is {parameters!r}, not a whole number")
    return Layer(name, int(parameters), *(_number(row, where, field) for field in _TIMES))


def _network(data: object, nodes: int | None) -> Network:
    if not isinstance(data, Mapping):
        raise ValueError(f"network is {data!r}, not an object with a and b, or alpha, beta, gamma and collective")
    if "alpha" in data or "beta" in data or "gamma" in data:
        _known(data, "network", {"alpha", "beta", "gamma", "collective"})
        if data.get("collective", "ring") != "ring":
            raise ValueError(f"network: collective is {data['collective']!r}; only 'ring' has a formula here")
        return RingNetwork(*(_number(data, "network", field) for field in ("alpha", "beta", "gamma")))
    _known(data, "network", {"a", "b", "collective"})
    collective = data.get("collective", "allreduce")
    if collective not in COLLECTIVES:
        raise ValueError(f"network: collective is {_shown(collective)}; a and b are of one of {', '.join(COLLECTIVES)}")
    return LinearNetwork(_number(data, "network", "a"), _number(data, "network", "b"), nodes, collective)


def _network_dict(network: Network) -> dict[str, Any]:
    if isinstance(network, LinearNetwork):
        marked = {} if network.collective == "allreduce" else {"collective": network.collective}
        return {"a": network.a, "b": network.b, **marked}
    return {"alpha": network.alpha, "beta": network.beta, "gamma": network.gamma, "collective": "ring"}


def _nodes_dict(network: Network) -> dict[str, int]:
    measured = network.nodes if isinstance(network, LinearNetwork) else None
    return {} if measured is None else {"nodes": measured}


def _get(data: Mapping[str, Any], where: str, field: str) -> object:
    if field not in data:
        raise ValueError(f"{where}: {field} is missing")
    return data[field]


def _number(data: Mapping[str, Any], where: str, field: str) -> float:
    value = _get(data, where, field)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {field} is {value!r}, not a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {field} is {value}, not a finite number")
    if value < 0:
        raise ValueError(f"{where}: {field} is {_shown(value)}, and may not be negative")
    if value > LARGEST:
        raise ValueError(f"{where}: {field} is {_shown(value)}: above {LARGEST:.0e} it fits no machine")
    return value


def _shown(value: object) -> str:
    """Format a value for an error message, shortened."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}.."


def _known(data: Mapping[str, Any], where: str, fields: set[str]) -> None:
    unknown = sorted(set(data) - fields)
    if unknown:
        raise ValueError(f"{where}: unknown {', '.join(map(repr, unknown))}; known are {', '.join(sorted(fields))}")
