"""Answers to the explorer's questions: the layouts of a model, the costs of one of them, and the command lines."""

import shlex
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from meshwright import prediction
from meshwright.errors import ClusterError, LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.files import did_you_mean
from meshwright.ir.trace import Trace
from meshwright.prediction import SearchResult, SetupOption
from meshwright.report import PageContent, WeighedLayout
from meshwright.report.timeline import Timeline, stages_timeline

Size = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
MOST_KEPT = 32
"""Number of searches whose results are kept."""
CHANGED = "cluster.toml"
"""The file that holds a cluster with other links."""
OTHERS = 24
"""Largest number of layouts that are shown beside the front."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The page's choices. ``seq`` 0: the model's own length. ``inside`` and ``between`` multiply the speed of links.
    ``layout`` has words such as ``tp=8,pp=2``; empty: the best."""

    model: str = "llama3-70b"
    cluster: str = "h100-dgx-ndr400x8"
    devices: Size = 256
    batch: Size = 512
    seq: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    inside: float = 1.0
    between: float = 1.0
    recompute: Literal["any", "none", "selective", "full"] = "any"
    software: str = ""
    layout: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its answer: the report on the layout in question, the other layouts, and the search."""

    question: Question
    cluster: Cluster
    result: SearchResult
    chosen: SetupOption
    report: PageContent
    others: tuple[WeighedLayout, ...]
    trace: Trace | None
    """The step, with one rank of each stage; None if it has too many actions."""


def read_question(query: Mapping[str, str]) -> Question:
    """The question in a query string; empty values are left out.

    Raises:
        LayoutError: a key is unknown, or a value has the wrong type or size.
    """
    fields = {key: value for key, value in query.items() if value != ""}
    try:
        return msgspec.convert(fields, Question, strict=False)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        remedy = "correct the value, or open the page anew"
        raise LayoutError(problem, where=place.rstrip("`") or "the question", remedy=remedy) from None


class Explorer:
    """Answers questions about models and clusters of the catalog, and about ``models`` and ``clusters``: files that the
    command line has named. No other file is read. Results of searches are kept."""

    def __init__(self, models: Sequence[str] = (), clusters: Sequence[str] = ()) -> None:
        self.models = [*models, *prediction.model_names()]
        self.clusters = [*clusters, *prediction.cluster_names()]
        usual = Question()
        self.first = Question(model=[*models, usual.model][0], cluster=[*clusters, usual.cluster][0])
        self.software = prediction.software_names()
        self._searches: OrderedDict[Question, tuple[Cluster, SearchResult]] = OrderedDict()
        self._lock = threading.Lock()
        self._newest: Answer | None = None

    def answer(self, question: Question) -> Answer:
        """The layouts of a model on a cluster, and the report on one of them.

        Raises:
            LayoutError: the model or the layout is unknown, or does not fit; or there is no layout.
            ClusterError: the cluster or its software is unknown, or cannot have that many devices.
        """
        cluster, result = self._searched(question)
        chosen = self._chosen(question, cluster, result)
        report = prediction.explain(result, cluster, chosen=chosen, command=commands(question, chosen)[0][1])
        if report is None:
            raise LayoutError("there is no layout", where=question.model, remedy="take more devices")
        front = {layout.words for layout in report.front}
        others = [option for option in result.options if prediction.layout_words(option.setup) not in front]
        answer = Answer(
            question=question, cluster=cluster, result=result, chosen=chosen, report=report,
            others=tuple(prediction.weighed_layout(option, chosen) for option in others[:OTHERS]),
            trace=report.trace or prediction.rehearsed_trace(chosen.setup, cluster),
        )  # fmt: skip
        self._newest = answer
        return answer

    def timeline(self, question: Question) -> Timeline:
        """The step of the layout in question, action by action: one rank of each stage, and all ranks.

        Raises:
            LayoutError: as in ``answer``; or the schedule is too long to be rehearsed.
            ClusterError: as in ``answer``.
        """
        newest = self._newest
        if newest is not None and question in (newest.question, fixed(newest)):
            setup, trace = newest.chosen.setup, newest.trace
        elif question.layout:  # without a search
            cluster = self._cluster(question)
            setup = self._given(question, cluster).setup
            trace = prediction.rehearsed_trace(setup, cluster)
        else:
            answer = self.answer(question)
            setup, trace = answer.chosen.setup, answer.trace
        if trace is None:
            raise LayoutError(
                "the schedule has too many actions to be shown", where=prediction.layout_words(setup),
                remedy="take a larger micro-batch, or a smaller batch",
            )  # fmt: skip
        stages = [rank // setup.stage_stride % setup.pp for rank in range(setup.world_size)]
        return stages_timeline(trace, stages)

    def _cluster(self, question: Question) -> Cluster:
        for kind, name, known in (
            ("model", question.model, self.models), ("cluster", question.cluster, self.clusters),
            ("software", question.software, ["", *self.software]),
        ):  # fmt: skip
            if name not in known and not (kind == "cluster" and _is_name(name)):
                error = LayoutError if kind == "model" else ClusterError
                hint = "choose one" if kind == "software" else f"choose one, or name a file by `meshwright ui --{kind}`"
                raise error(f"unknown {kind} {name!r}", where=kind, remedy=did_you_mean(name, known, hint))
        cluster = prediction.load_cluster(question.cluster, question.devices, question.software or None)
        return prediction.with_links(cluster, inside=question.inside, between=question.between)

    def _searched(self, question: Question) -> tuple[Cluster, SearchResult]:
        key = msgspec.structs.replace(question, layout="")
        with self._lock:  # questions about one search come in parallel
            if key in self._searches:
                self._searches.move_to_end(key)
                return self._searches[key]
            cluster = self._cluster(question)
            result = prediction.find_layouts(
                prediction.load_model(question.model, sequence=question.seq), cluster, global_batch=question.batch,
                recompute=question.recompute,
            )  # fmt: skip
            self._searches[key] = cluster, result
            if len(self._searches) > MOST_KEPT:
                self._searches.popitem(last=False)
            return cluster, result

    def _chosen(self, question: Question, cluster: Cluster, result: SearchResult) -> SetupOption:
        if question.layout:
            by_words = {prediction.layout_words(option.setup): option for option in (*result.options, *result.front)}
            return by_words.get(question.layout) or self._given(question, cluster)
        best = result.options[0] if result.options else result.nearest
        if best is None:
            raise LayoutError("there is no layout", where=question.model, remedy="take more devices")
        return best

    def _given(self, question: Question, cluster: Cluster) -> SetupOption:
        model = prediction.load_model(question.model, sequence=question.seq)
        setup = prediction.setup_of(
            question.layout, model, question.batch, question.devices, cluster.device, where="layout"
        )
        if setup.world_size != question.devices:
            raise LayoutError(
                f"{question.layout} has {setup.world_size} ranks, not {question.devices}", where="layout",
                remedy="correct an axis, or leave dp out: it takes the devices that other axes leave",
            )  # fmt: skip
        return prediction.weigh(setup, cluster)


def fixed(answer: Answer) -> Question:
    """The question about the very layout of an answer."""
    return msgspec.structs.replace(answer.question, layout=answer.report.words)


def _is_name(text: str) -> bool:
    """Whether a text can be a name of a cluster, DEVICE-BOX-FABRIC, and no path."""
    return not text.endswith(".toml") and all(letter.isalnum() or letter in "-_" for letter in text)


def commands(question: Question, chosen: SetupOption) -> list[tuple[str, str]]:
    """The command lines that make what the page shows: what each is for, and the line. With other links, they name the
    file ``CHANGED``, which the page exports."""
    named = question.cluster if question.inside == question.between == 1 else CHANGED
    only = question.recompute if question.recompute != "any" else ""
    sizes: dict[str, str | int] = {
        "cluster": named, "ranks": question.devices, "batch": question.batch, "seq": question.seq,
        "software": question.software,
    }  # fmt: skip
    search = _line("plan", question.model, **sizes, recompute=only)
    lines = [
        ("search these layouts", search),
        ("search them, and write the page of the best", f"{search} --report plan.html"),
        (
            "predict this layout, in closed form",
            prediction.predict_command(chosen.setup, question.model, named, question.software),
        ),
    ]
    if not chosen.setup.grid:
        layout = prediction.layout_words(chosen.setup)
        line = _line("export", question.model, to="torchtitan", **sizes, layout=layout)
        lines.append(("write it for another trainer (or megatron, deepspeed, accelerate)", line))
    return lines


def _line(command: str, model: str, **options: str | int) -> str:
    words = [word for name, value in options.items() if value for word in (f"--{name}", str(value))]
    return shlex.join(["meshwright", command, model, *words])
