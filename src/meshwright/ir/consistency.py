"""Consistency rules: when a replica of the model may go on, and how the states of replicas are mixed.

A replica is a model that any layout trains; a rule joins several. A rule is a text in a layout and a plan:

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
"""The staleness of rules under which nobody waits."""


class Sync(msgspec.Struct, frozen=True, tag=True):
    """All replicas make one step on one batch. Lowered to data parallelism."""

    def __str__(self) -> str:
        return "sync"


class Server(msgspec.Struct, frozen=True, tag=True):
    """Servers hold the parameters and the optimizer. A replica pushes its gradients, and pulls parameters before its
    next step.

    ``staleness``: the steps by which a replica may be ahead of the slowest; ``ASYNC``: any. ``servers``: each holds one
    range of the parameters. ``copies``: so many servers hold a range, so that all but one of them may die. ``place``:
    servers run beside replicas, in the same processes, or on ranks of their own (``own``), the last ranks."""

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

    ``staleness``: neighbours' parameters may be so many steps old. With 0, replicas mix what their optimizers have
    made: (X - eta G) W, which is synchronous training if W is 1/P everywhere. With 1, they mix the parameters before
    the step, X W - eta G, as D-PSGD is printed: letters travel while gradients are computed. With more, mixing is
    damped (``consistency/gossip.py``). ``ASYNC``: a replica takes what has come. ``push``: push-sum, whose weights make
    up for unequal numbers of messages. ``edges``: the pairs of the topology ``edges``, and optionally the weight of
    each pair, or 0."""

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
    """After every ``every`` steps, a replica x and the center c attract each other: x loses alpha (x - c), and c gains
    that of all replicas. Synchronous: of all replicas at once. ``asynchronous``: of each replica when it comes."""

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
    Douillard et al. 2025). ``delay``: steps between sending a change and applying the mean. ``merge``: the share of the
    replica's own parameters in the mixture with the outer optimizer's. ``codec``: of the changes on their way."""

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
    """A step is made with the gradients of the first ``count`` replicas; the others' gradients count in a later step.
    ``count``: ``solo`` (one), ``majority`` (half of the replicas, rounded up), or a number. ``copies``: of the server
    beside a replica that adds the gradients up, so that all but one of them may die."""

    count: str
    copies: int = 2

    def least(self, num_replicas: int) -> int:
        """The number of replicas whose gradients a step waits for, of ``num_replicas`` that live."""
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
    """Whether the outcome depends on when letters arrive."""
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
    """The rule that a text names.

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
    """Whether a codec can code changes of parameters: it has messages of its own, and neither the momentum nor the
    warm-up of a gradient's."""
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
