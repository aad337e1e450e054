"""Documents of the tasks in every layout they are passed around in, turned into the one that lm_eval reads.

lm_eval's prompts are made from the fields of the data sets on the Hub. Files in circulation have others, some with half
of the prompt already made; each function here takes a document of any of its task's layouts and returns one with the
Hub's fields, from which lm_eval makes, by its own rules, the prompt that it makes of the original.
"""

import re
from collections.abc import Callable
from typing import Any

__all__ = [
    "arc",
    "boolq",
    "copa",
    "hellaswag",
    "lambada",
    "openbookqa",
    "piqa",
    "require_choice",
    "require_fields",
    "winogrande",
    "wsc",
]

Document = dict[str, Any]

_LAST_SENTENCE = re.compile(r"(.*[.!?][\"')]*) +([^A-Z.!?][^.!?]*)", re.DOTALL)
_LETTERS = "ABCDEFGHIJ"
_MOST_DIGITS = 9  # of a label
_CONNECTORS = {"because": "cause", "therefore": "effect"}


def hellaswag(document: Document) -> Document:
    """Fields of the authors' files, or `ctx` that begins with the activity's label, `endings` and `label`.

    In the latter the first words of the ending (`ctx_b`: "the man") are told from the rest of the context by being a
    sentence that begins in lower case; how-to articles ("LABEL: How to ...") have none.
    """
    is_original = {"activity_label", "ctx_a", "ctx_b"} <= document.keys()
    require_fields(document, *(() if is_original else ("ctx",)), "endings", "label")
    require_choice(_number(document["label"]), len(document["endings"]), "label")
    if is_original:
        return document
    activity, _, context = document["ctx"].partition(": ")
    begun = _LAST_SENTENCE.fullmatch(context)
    first, second = begun.groups() if begun else (context, "")
    return {**_without(document, "ctx"), "activity_label": activity, "ctx_a": first, "ctx_b": second}


def piqa(document: Document) -> Document:
    """`goal`, `sol1`, `sol2` and `label`: there is one layout."""
    require_fields(document, "goal", "sol1", "sol2", "label")
    return {**document, "label": require_choice(_number(document["label"]), 2, "label")}


def boolq(document: Document) -> Document:
    """SuperGLUE's fields, the authors' (`answer` true or false), or `query`, `choices` and `gold`."""
    if "query" in document:
        return _asked_boolq(document)
    right = "answer" if "answer" in document else "label"
    require_fields(document, "passage", "question", right)
    label = require_choice(_number(document[right]), 2, right)
    return {"passage": document["passage"], "question": document["question"], "label": label}


def copa(document: Document) -> Document:
    """SuperGLUE's fields, or `query` that ends in "because" or "therefore", `choices` and `gold`."""
    if "query" in document:
        document = _asked_copa(document)
    require_fields(document, "premise", "choice1", "choice2", "question", "label")
    if document["question"] not in _CONNECTORS.values():
        raise ValueError(f"expected cause or effect as `question`, found {document['question']!r}")
    label = require_choice(_number(document["label"]), 2, "label")
    return {name: document[name] for name in ("premise", "choice1", "choice2", "question")} | {"label": label}


def wsc(document: Document) -> Document:
    """Fields of SuperGLUE's wsc.fixed on the Hub, or of its authors' files, whose spans are in `target`.

    Where a span of the authors is not in the text, its first letter, full stop or line's end is mended as on the Hub.
    """
    fields = {**document, **document.get("target", {})}
    require_fields(fields, "text", "span1_index", "span1_text", "span2_index", "span2_text", "label")
    label = require_choice(_number(fields["label"]), 2, "label")
    mended = {f"{span}_text": _mended(fields, span) for span in ("span1", "span2")}
    return {name: fields[name] for name in ("text", "span1_index", "span2_index")} | mended | {"label": label}


def lambada(document: Document) -> Document:
    """`text`, or `context` and `continuation`."""
    if "text" in document:
        return document
    require_fields(document, "context", "continuation")
    return {"text": document["context"].rstrip() + " " + document["continuation"].strip()}


def arc(document: Document) -> Document:
    """The Hub's fields, the authors' (`question` with `stem` and `choices`), or `query`, `choices` and `gold`."""
    return _question(document, "question", "Question: ")


def openbookqa(document: Document) -> Document:
    """As `arc`, with `question_stem` on the Hub."""
    return _question(document, "question_stem", "")


def winogrande(document: Document) -> Document:
    """The Hub's fields, which are the authors', or `context_options`, `continuation` and `gold`."""
    if {"sentence", "option1", "option2", "answer"} <= document.keys():
        if document["answer"] not in ("1", "2"):
            raise ValueError(f"expected '1' or '2' as `answer`, found {document['answer']!r}")
        return document
    require_fields(document, "context_options", "continuation", "gold")
    require_choice(document["gold"], len(document["context_options"]), "gold")
    options = document["context_options"]
    differing = (index for index, pair in enumerate(zip(*options, strict=False)) if len(set(pair)) > 1)
    begin = options[0].rfind(" ", 0, next(differing, min(map(len, options)))) + 1  # options are whole words
    return {
        "sentence": f"{options[0][:begin]}_ {document['continuation'].strip()}",
        "option1": options[0][begin:],
        "option2": options[1][begin:],
        "answer": str(document["gold"] + 1),
    }


def _asked_boolq(document: Document) -> Document:
    """The fields that "Passage: ...\\nQuestion: ...?\\n" was made of."""
    require_fields(document, "choices", "gold")
    passage, found, question = document["query"].rpartition("\nQuestion: ")
    if not found or document["choices"] != ["no", "yes"]:
        raise ValueError("expected a `query` with a line 'Question: ' and the choices no and yes, found others")
    label = require_choice(document["gold"], 2, "gold")
    question = question.removesuffix("\nAnswer:").strip().removesuffix("?")
    return {"passage": passage.removeprefix("Passage: "), "question": question, "label": label}


def _asked_copa(document: Document) -> Document:
    """The fields that "..., because" or "..., therefore" was made of."""
    require_fields(document, "choices", "gold")
    premise, _, connector = document["query"].rpartition(" ")
    if connector not in _CONNECTORS or len(document["choices"]) != 2:
        raise ValueError("expected a `query` that ends in because or therefore and two choices, found others")
    first, second = document["choices"]
    asked = {"choice1": first, "choice2": second, "question": _CONNECTORS[connector], "label": document["gold"]}
    return {"premise": premise.removesuffix(",") + ".", **asked}


def _mended(fields: Document, span: str) -> str:
    """A span as it stands in the text."""
    text = fields[f"{span}_text"]
    if text in fields["text"]:
        return text
    in_lower_case = fields["text"].split()[fields[f"{span}_index"]][0].islower()
    first = text[0].lower() if in_lower_case else text[0].upper()
    return (first + text[1:]).rstrip(".").replace("\n", " ")


def _question(document: Document, field: str, prompt: str) -> Document:
    """A question with several answers, in any of the layouts that ARC and OpenBookQA have."""
    if "query" in document:
        require_fields(document, "query", "choices", "gold")
        require_choice(document["gold"], len(document["choices"]), "gold")
        labels = list(_LETTERS[: len(document["choices"])])
        answers = {"text": document["choices"], "label": labels}
        stem = document["query"].removeprefix(prompt).removesuffix("\nAnswer:")
        return {field: stem, "choices": answers, "answerKey": labels[document["gold"]]}
    if isinstance(document.get("question"), dict):
        require_fields(document["question"], "stem", "choices")
        choices = document["question"]["choices"]
        answers = {name: [choice[name] for choice in choices] for name in ("text", "label")}
        document = {field: document["question"]["stem"], "choices": answers, **_without(document, "question")}
    require_fields(document, field, "choices", "answerKey")
    if document["answerKey"] not in document["choices"]["label"]:
        raise ValueError(
            f"expected one of {document['choices']['label']} as `answerKey`, found {document['answerKey']!r}"
        )
    return {name: document[name] for name in (field, "choices", "answerKey")}


def _number(label: Any) -> Any:
    """A label as a number, if it is one in quotes, or true or false."""
    is_number = isinstance(label, str) and label.isdecimal() and len(label) <= _MOST_DIGITS
    return int(label) if isinstance(label, bool) or is_number else label


def require_fields(document: Document, *fields: str) -> None:
    """Refuse a document that lacks one of the fields.

    Raises:
        ValueError: with the fields that it has.
    """
    missing = [field for field in fields if field not in document]
    if missing:
        raise ValueError(f"expected the fields {', '.join(fields)}, found {', '.join(document) or 'none'}")


def require_choice(found: Any, count: int, field: str) -> int:
    """The number of the right choice, if it is one.

    Args:
        found: what the file has.
        count: how many choices there are.
        field: where it was found.

    Raises:
        ValueError: no whole number from 0 to count - 1.
    """
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < count:
        raise ValueError(
            f"expected a number from 0 to {count - 1} as `{field}`, the place of a choice, found {found!r}"
        )
    return found


def _without(document: Document, field: str) -> Document:
    """All other fields."""
    return {name: value for name, value in document.items() if name != field}


Layout = Callable[[Document], Document]
