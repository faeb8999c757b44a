"""The page of a generated answer: what it rests on."""

from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.generation.result import GenerationResult
from captum_norm.results import make_page
from captum_norm.show.page.document import Column, Example, Graph, Maps, Scores, Table
from captum_norm.show.page.flow import flow_graph
from captum_norm.show.page.html import Page
from captum_norm.show.page.tokens import tokens_of_text


@make_page.register
def answer_page(result: GenerationResult) -> Page:
    """Collect what an answer rests on; see :func:`captum_norm.show.render_answer`."""
    method, unit = result.explained.method, result.explained.unit
    scores, rows, segments = result.seq_attr, result.token_attr, result.segment_attr
    signed = any(values is not None and bool((values < 0).any()) for values in (scores, rows, segments))
    example = Example(
        title=result.explained.answer,
        inputs=tokens_of_text(result.input_tokens),
        outputs=tokens_of_text(result.output_tokens),
        scores=[Scores(method, unit, scores, signed)],
        maps=[] if rows is None else [Maps(method, unit, rows[None], [0], "answer", signed)],
        graph=None if result.graph is None else _graph(result.graph, method, len(result.input_tokens)),
    )
    tables = []
    if result.segments is not None and segments is not None:
        cells = list(zip(range(len(result.segments)), result.segments, segments.tolist(), strict=True))
        tables.append(Table("Segments", [Column("number", "number"), Column("segment"), Column(unit, "signed")], cells))
    title = f"What “{result.explained.answer.strip()}” rests on"
    return Page(title, facts=result.facts(), examples=[example], tables=tables)


def _graph(graph: FlowGraph, method: str, inputs: int) -> Graph:
    """The routes between the inputs: the last output is at the last one, whatever comes before its stack."""
    first, last = graph.outputs[0], graph.outputs[-1]
    return flow_graph(graph, method, starts={last.stack: inputs - 1 - last.position}, first=first.position)
