"""Compares methods on answers of language models: which say what an answer rests on."""

from captum_norm.lab.answers.results import ANSWER_MEASURES, AnswerComparison, AnswerScores
from captum_norm.lab.answers.run import SourcePrompt, compare_answers, read_prompts

__all__ = ["ANSWER_MEASURES", "AnswerComparison", "AnswerScores", "SourcePrompt", "compare_answers", "read_prompts"]
