"""Consistency rules: when a replica of the model may continue, and how the states of replicas are mixed.

A replica is a model that any layout trains; a rule joins several replicas. A rule is a text in a layout and a plan:

    sync                      one batch, one gradient: replicas are more data parallelism
    server(sync)              servers hold the parameters; replicas push gradients and pull parameters, all in step
    server(ssp=3)             a replica may be 3 steps ahead of the slowest (stale synchronous parallel, Ho et al. 2013)
    server(async)             nobody waits
    gossip(ring)              each step, replicas average with neighbours (D-PSGD, Lian et al. 2017): ring, torus,
                              exponential, one-peer, random, complete, or edges=0-1 1-2 2-0
    gossip(one-peer, push=on) push-sum (SGP, Assran et al. 2019)
    easgd(0.1, every=10)      replicas and a center attract each other (Zhang et al. 2015)
    local(16)                 parameters are averaged after every 16 steps (local SGD)
    diloco(50)                an outer optimizer's gradient is the mean change of 50 steps (Douillard et al. 2023)
    partial(majority)         a step needs some replicas' gradients; late gradients count in the next (Li et al. 2020)
    ensemble                  no exchange: members of an ensemble

Options: ``server(ssp=3, servers=2, copies=2, place=own)``, ``gossip(ring, staleness=2)``, ``easgd(0.1, every=10,
mode=async)``, ``diloco(50, lr=0.7, momentum=0.9, fragments=4, delay=5, merge=0.5, codec=qsgd(4))``.
"""

from functools import lru_cache
from typing import Literal, get_args

import msgspec

from meshwright.errors import PlanError
from meshwright.ir.call_text import SWITCH, CallText, Wrong
from meshwright.ir.codec import Codec, codec_of

Topology = Literal["ring", "torus", "exponential", "one-peer", "random", "complete", "edges"]
ASYNC = -1
"""The staleness of rules under which replicas never wait."""


class Sync(msgspec.Struct, frozen=True, tag=True):
    """All replicas together make one step on one batch. This is lowered to data parallelism."""

    def __str__(self) -> str:
        return "sync"


class Server(msgspec.Struct, frozen=True, tag=True):
    """Servers hold the parameters and the optimizer. A replica pushes gradients to the servers, and pulls parameters
    before its next step.

    ``staleness``: how many steps a replica may be ahead of the slowest replica; ``ASYNC``: any number. ``servers``: the
    number of servers, each with a range of the parameters. ``copies``: the number of servers with the same range, so
    that all but one of them may die. ``place``: servers run in the processes of replicas, or on the last ranks, which
    then hold no replica (``own``)."""

    staleness: int = 0
    servers: int = 1
    copies: int = 1
    place: Literal["beside", "own"] = "beside"

    def __str__(self) -> str:
        mode = {0: "sync", ASYNC: "async"}.get(self.staleness, f"ssp={self.staleness}")
        options = [f"servers={self.servers}"] * (self.servers > 1) + [f"copies={self.copies}"] * (self.copies > 1)
        return f"server({', '.join([mode, *options, *['place=own'] * (self.place == 'own')])})"


class Gossip(msgspec.Struct, frozen=True, tag=True):
    """In every step, a replica averages its parameters with those of its neighbours.

    ``staleness``: how many steps old the neighbours' parameters may be. With 0, replicas mix the results of their
    optimizers: (X - eta G) W. This equals synchronous training if every weight in W is 1/P. With 1, they mix the
    parameters before the step: X W - eta G, as D-PSGD is published. Parameters then travel while gradients are
    computed. With 2 or more, mixing is damped (``consistency/gossip.py``). ``ASYNC``: a replica uses all parameters
    that have arrived. ``push``: push-sum, in which weights compensate for unequal numbers of messages. ``edges``: the
    pairs of the topology ``edges``, each with a weight (0: the default weight)."""

    topology: Topology
    staleness: int = 0
    push: bool = False
    edges: tuple[tuple[int, int, float], ...] = ()

    def __str__(self) -> str:
        pairs = " ".join(f"{a}-{b}" + (f":{weight:g}" if weight else "") for a, b, weight in self.edges)
        words = [f"edges={pairs}" if self.edges else self.topology]
        if self.staleness:
            words.append(f"staleness={'any' if self.staleness == ASYNC else self.staleness}")
        return f"gossip({', '.join([*words, *['push=on'] * self.push])})"


class ElasticAverage(msgspec.Struct, frozen=True, tag=True):
    """After every ``every`` steps, each replica x and the center c attract each other: x loses alpha (x - c), and c
    gains the alpha (x - c) of all replicas. In the synchronous mode, all replicas do this at the same time. With
    ``asynchronous``, each replica does it when its own steps are done."""

    alpha: float
    every: int = 1
    asynchronous: bool = False

    def __str__(self) -> str:
        mode = ["mode=async"] * self.asynchronous
        return f"easgd({', '.join([f'{self.alpha:g}', *[f'every={self.every}'] * (self.every > 1), *mode])})"


class Local(msgspec.Struct, frozen=True, tag=True):
    """Replicas average their parameters after every ``every`` steps."""

    every: int

    def __str__(self) -> str:
        return f"local({self.every})"


class DiLoCo(msgspec.Struct, frozen=True, tag=True):
    """After every ``every`` steps, an outer SGD with Nesterov momentum (``lr``, ``momentum``) takes the mean change of
    the replicas' parameters as its gradient.

    ``fragments``: parts of the parameters that take turns, one every ``every / fragments`` steps (Streaming DiLoCo,
    Douillard et al. 2025). ``delay``: steps between sending a change and applying the mean. ``merge``: the weight of
    the replica's own parameters when they are mixed with the outer optimizer's. ``codec``: the codec of the parameter
    changes that replicas send."""

    every: int
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    merge: float = 0.0
    codec: str = ""

    def __str__(self) -> str:
        default = DiLoCo(self.every)
        names = ("lr", "momentum", "fragments", "delay", "merge", "codec")
        values = [(name, getattr(self, name)) for name in names if getattr(self, name) != getattr(default, name)]
        words = [f"{name}={value:g}" if isinstance(value, int | float) else f"{name}={value}" for name, value in values]
        return f"diloco({', '.join([str(self.every), *words])})"


class Partial(msgspec.Struct, frozen=True, tag=True):
    """A step uses the gradients of the first ``count`` replicas that are ready; the others' gradients count in a later
    step. ``count``: ``solo`` (one), ``majority`` (half of the replicas, rounded up), or a number. ``copies``: the
    number of copies of the server that adds up the gradients, so that all but one of them may die."""

    count: str
    copies: int = 2

    def least(self, num_replicas: int) -> int:
        """The number of replicas for whose gradients a step waits, if ``num_replicas`` are alive."""
        wanted = {"solo": 1, "majority": -(-num_replicas // 2)}.get(self.count)
        return max(1, min(num_replicas, int(self.count) if wanted is None else wanted))

    def __str__(self) -> str:
        return f"partial({', '.join([self.count, *[f'copies={self.copies}'] * (self.copies != 2)])})"


class Ensemble(msgspec.Struct, frozen=True, tag=True):
    """Replicas train alone, from different initial values, and predict together."""

    def __str__(self) -> str:
        return "ensemble"


Consistency = Sync | Server | Gossip | ElasticAverage | Local | DiLoCo | Partial | Ensemble


def is_asynchronous(rule: Consistency) -> bool:
    """Whether results depend on when messages between replicas arrive."""
    match rule:
        case Server(staleness=staleness) | Gossip(staleness=staleness):
            return staleness != 0
        case ElasticAverage(asynchronous=asynchronous):
            return asynchronous
        case _:
            return isinstance(rule, Partial)


NAMES = (
    "sync, server(sync), server(ssp=S), server(async), gossip(TOPOLOGY), easgd(ALPHA), local(STEPS), diloco(STEPS), "
    "partial(solo), partial(majority), partial(COUNT) or ensemble"
)


@lru_cache(maxsize=256)
def consistency_of(text: str) -> Consistency:
    """The rule that a text describes.

    Raises:
        PlanError: the text is malformed, or a name, number or option is unknown or out of range.
    """

    def wrong(problem: str, remedy: str) -> PlanError:
        return PlanError(problem, where=f"consistency {text!r}", remedy=remedy)

    call = CallText(text, wrong, NAMES, "consistency rule")
    rule: Consistency
    match call.name:
        case "sync":
            rule = Sync()
        case "server":
            rule = _server(call)
        case "gossip":
            rule = _gossip(call, wrong)
        case "easgd":
            alpha, every = call.number("alpha", 0, 1), call.whole("every", 1, 1)
            rule = ElasticAverage(alpha, every, call.choice("mode", ("sync", "async"), "sync") == "async")
        case "local":
            rule = Local(call.whole("every", 1))
        case "diloco":
            rule = _diloco(call, wrong)
        case "partial":
            count = str(call.whole("count", 1)) if call.has_number() else call.word(("solo", "majority"), "majority")
            rule = Partial(count, call.whole("copies", 1, 2))
        case "ensemble":
            rule = Ensemble()
        case _:
            raise wrong(f"there is no rule {call.name!r}", f"write {NAMES}")
    call.end()
    return rule


def codes_changes(codec: Codec) -> bool:
    """Whether a codec can encode changes of parameters: it must make messages of its own, and have neither the momentum
    nor the warm-up of a gradient codec."""
    return codec.exchange in ("hops", "merges") and not codec.momentum and not codec.warmup


def _server(call: CallText) -> Server:
    staleness = call.whole("ssp", 0) if call.has("ssp") else {"sync": 0, "async": ASYNC}[call.word(("sync", "async"))]
    place = call.choice("place", ("beside", "own"), "beside")
    servers, copies = call.whole("servers", 1, 1), call.whole("copies", 1, 1)
    return Server(staleness, servers, copies, "own" if place == "own" else "beside")


def _gossip(call: CallText, wrong: Wrong) -> Gossip:
    edges: list[tuple[int, int, float]] = []
    for pair in call.text("edges").split():
        ends, _, weight = pair.partition(":")
        first, _, second = ends.partition("-")
        try:
            edges.append((int(first), int(second), float(weight) if weight else 0.0))
        except ValueError:
            raise wrong(f"edges with {pair!r}", "write pairs of replicas: edges=0-1 1-2 2-0, or 0-1:0.3") from None
    known = tuple(name for name in get_args(Topology) if name != "edges")
    topology: Topology = "edges" if edges else call.word(known)  # type: ignore[assignment]
    text = call.text("staleness", "0")
    if text != "any" and not text.isdecimal():
        raise wrong(f"staleness={text}", "staleness is a number of steps, or any")
    push = call.choice("push", SWITCH, "off") == "on"
    return Gossip(topology, ASYNC if text == "any" else int(text), push, tuple(edges))


def _diloco(call: CallText, wrong: Wrong) -> DiLoCo:
    every = call.whole("every", 1)
    rule = DiLoCo(
        every, call.number("lr", 0, 100, 0.7), call.number("momentum", 0, 0.9999, 0.9), call.whole("fragments", 1, 1),
        call.whole("delay", 0, 0), call.number("merge", 0, 1, 0.0), call.text("codec"),
    )  # fmt: skip
    if every % rule.fragments:
        raise wrong(f"{rule.fragments} fragments in {every} steps", "give a divisor of the steps")
    if rule.delay >= every:
        problem = f"delay={rule.delay} in {every} steps: a fragment would be sent again before its mean is applied"
        raise wrong(problem, f"give a delay of less than {every}")
    if rule.codec and not codes_changes(codec_of(rule.codec)):
        remedy = "take fp16, bf16, qsgd, onebit, topk, threshold or lossless, without momentum and warmup"
        raise wrong(f"codec={rule.codec} does not code changes of parameters", remedy)
    return rule
