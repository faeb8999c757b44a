"""Numbers on the command line, and what is none."""

import argparse

import pytest

from alignment import cli as alignment_cli
from captum_norm import cli
from captum_norm.commands.shared import natural, positive, resamples


def test_whole_numbers() -> None:
    assert (positive("1"), natural("0"), resamples("0"), resamples("2"), natural("9" * 9)) == (1, 0, 0, 2, 10**9 - 1)


@pytest.mark.parametrize(
    ("parse", "texts"),
    [(positive, ["0"]), (natural, []), (resamples, ["1"])],
)
def test_what_is_no_such_number_is_refused(parse: object, texts: list[str]) -> None:
    for text in [*texts, "", "-1", "1.5", "x", "²", "9" * 10, "9" * 5000, "\x1b[31m"]:
        with pytest.raises(argparse.ArgumentTypeError) as raised:
            parse(text)  # type: ignore[operator]
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (cli.main, ["analyze", "dispersion", "--seed"]),
        (cli.main, ["analyze", "dispersion", "--limit"]),
        (cli.main, ["compare", "a dog", "--seed"]),
        (cli.main, ["explain", "a dog", "--layer"]),
        (cli.main, ["explain", "a dog", "--position"]),
        (alignment_cli.main, ["extract", "-", "--max-words"]),
        (alignment_cli.main, ["sweep", "--max-tokens"]),
        (alignment_cli.main, ["evaluate", "gold", "system", "--trials"]),
        (alignment_cli.main, ["evaluate", "gold", "system", "--gold-base"]),
    ],
)
def test_a_number_of_thousands_of_digits_is_refused_in_one_sentence(
    main: object, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "9" * 5000]) == 2  # type: ignore[operator]
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert len(error) <= 1100
