"""What a launch script would run, found without running it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.interop.arguments import options_from
from greylag.interop.script import read_script
from greylag.interop.words import expand, is_unset, unset_name
from greylag.spec import SpecError


def last(text: str, **given: str) -> tuple[str, ...]:
    return read_script(text, given, "run.sh").commands[-1]


def test_words_are_expanded_as_bash_does() -> None:
    text = """
    A=one; B="two words" # a comment with an apostrophe: it's one
    C='$A'
    ARGS=(--a $A  # first
          --b "$B" '--c')
    ARGS+=(--d=${D:-"four"})
    run "${ARGS[@]}" ${ARGS[1]} $B "$C" x"$A"y \\
        --last
    """
    assert last(text) == (
        "run", "--a", "one", "--b", "two words", "--c", "--d=four", "one", "two", "words", "$A", "xoney", "--last"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "value"),
    [("$((8*4))", "32"), ("$(( N + 1 ))", "4"), ("$(($N*(2+3)))", "15"), ("$((7/2))", "3"), ("$((-7/2))", "-3"),
     ("$((7%4))", "3"), ("${N:-9}", "3"), ("${M:-9}", "9"), ("${M:+9}", ""), ("${N:+9}", "9"), ("${#}", None),
     ("$((1/0))", None), ("$((M+1))", None), ("$(date)", None), ("`date`", None), ("$M", None),
     ('${M:-"}"}', "}"), ("${M:-$(a ')')}", None)],
)  # fmt: skip
def test_values(expression: str, value: str | None) -> None:
    found = "".join(expand(expression, {"N": "3"}))
    assert is_unset(found) if value is None else found == value


def test_what_is_not_known_names_its_variable() -> None:
    assert unset_name("".join(expand("$M", {}))) == "$M"
    assert unset_name("".join(expand("$((M * 2))", {}))) == "$M"
    assert unset_name("".join(expand("$(nproc)", {}))) == "the output of a command"


@pytest.mark.parametrize(
    ("condition", "branch"),
    [('"$X" == "fp8"', "yes"), ('"$X" != "fp8"', "no"), ('-n "$X"', "yes"), ('-z "$NIL"', "yes"), ("$N -gt 2", "yes"),
     ("$N -lt 2", "no"), ("! $N -lt 2", "yes"), ('"$X" = "bf16" ]] || [[ $N -eq 3', "yes"),
     ('"$X" = "fp8" ]] && [[ $N -eq 4', "no"), ("-f file", "no")],
)  # fmt: skip
def test_branches_are_taken_by_what_is_known(condition: str, branch: str) -> None:
    text = f"X=fp8\nN=3\nif [[ {condition} ]]; then\n  run yes\nelse\n  run no\nfi"
    assert last(text) == ("run", branch)


def test_nested_branches_and_elif() -> None:
    text = """
    if [ "$M" = 7b ]; then L=32
    elif [ "$M" = 13b ]; then
      if [ -n "$DEEP" ]; then L=80; else L=40; fi
    else L=1
    fi
    run --num-layers $L
    """
    assert [last(text, M=m)[-1] for m in ("7b", "13b", "other")] == ["32", "40", "1"]
    assert last(text, M="13b", DEEP="1")[-1] == "80"


def test_undecidable_conditions_are_told_where_they_guard_something() -> None:
    guarded = read_script('A=1\nif [ -f "$F" ]; then A=2; fi\nrun $A', {}, "run.sh")
    assert guarded.commands[-1] == ("run", "1")
    assert guarded.skipped == ('[ -f "$F" ]',)
    assert read_script('if [ -f "$F" ]; then echo x; fi\nrun', {}, "run.sh").skipped == ()


def test_loops_and_their_own_arguments_are_passed_over() -> None:
    text = 'TP=2\nwhile [[ $# -gt 0 ]]; do case $1 in --tp) TP="$2"; shift 2;; *) exit 1;; esac; done\nrun $TP'
    assert last(text) == ("run", "2")


def test_what_the_caller_sets_wins() -> None:
    assert last("N=${N:-1}\nM=2\nrun $N $M", N="4", M="3") == ("run", "4", "3")


def test_pipes_redirections_and_documents() -> None:
    script = read_script(
        "run --a 1 2>&1 | tee log\ncat <<EOF > x\nit's data\nEOF\nsbatch <<EOF\nsrun --b\nEOF\n", {}, "s"
    )
    assert ("run", "--a", "1") in script.commands
    assert ("srun", "--b") in script.commands


def test_options_of_all_spellings() -> None:
    words = ["python", "--a", "1", "2", "--b=3", "--c_d", "-1e-3", "model.x_y=4", "--flag", "+train.z=5"]
    assert options_from(words) == {
        "a": ["1", "2"], "b": ["3"], "c-d": ["-1e-3"], "model.x_y": ["4"], "flag": [], "train.z": ["5"]
    }  # fmt: skip


@pytest.mark.parametrize("text", ["run 'open", 'A="open', "A=(1 2", "run $(open", "run ${open"])
def test_what_stays_open_is_named_by_line(text: str) -> None:
    with pytest.raises(SpecError, match=r"run\.sh: line 2: .* is never closed"):
        read_script(f"true\n{text}", {}, "run.sh")


PIECES = [*"\"'`$(){}[]<>|&;=+-*/%#! \n\\aN1", "if ", "then ", "fi", "do ", "${N:-", "$((", "A=(", "<<E\n", "case "]


@settings(max_examples=400, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    refused = ""
    try:
        script = read_script(text, {"N": "3"}, "run.sh")
        assert all(isinstance(word, str) for command in script.commands for word in command)
    except SpecError as error:
        refused = str(error)
    assert not refused or refused.startswith("run.sh: ")
