"""The public names of every package, held by a list: adding or removing one is a decision, seen in review.

When a name was added or removed on purpose, change the list here, and write the line in CHANGELOG.md. Mechanisms are
listed where they are built, in `attention/registry.py`.
"""

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from polysketch import attention
from polysketch.attention import MECHANISMS

PUBLIC_NAMES = {
    "ops": [
        "LinearAttentionResult",
        "LinearAttentionState",
        "LocalPolynomial",
        "StateRows",
        "BesideKey",
        "OpenChunk",
        "DocumentGroup",
        "PackedDocuments",
        "causal_convolution",
        "centred_convolution",
        "combine",
        "delta_attention",
        "delta_attention_extend_",
        "delta_writes",
        "delta_writes_backend",
        "depthwise_convolution_2d",
        "gray_rank",
        "hadamard_transform",
        "heavy_correction",
        "line_codes",
        "hash_codes",
        "hyper_attention",
        "linear_attention",
        "linear_attention_backend",
        "linear_attention_extend_",
        "linear_attention_sums",
        "local_attention",
        "lower_triangular_multiply",
        "nystrom_attention",
        "polynomial_attention",
        "polynomial_attention_backend",
        "polynomial_attention_with_cache",
        "skyformer_attention",
        "sliding_window_attention",
        "sliding_window_attention_backend",
        "sliding_window_attention_with_cache",
        "softmax_attention",
        "softmax_attention_with_cache",
        "squared_polynomial_attention",
        "squared_polynomial_attention_with_cache",
    ],
    "feature_maps": [
        "Elementwise",
        "PerformerFeatures",
        "FeatureMap",
        "FocusedFeatures",
        "PolarityFeatures",
        "PowerSketches",
        "GaussianSketch",
        "Hedgehog",
        "Identity",
        "LearnedSketch",
        "LowRankSketch",
        "RandomSketch",
        "SRHTSketch",
        "SketchProducts",
        "SoftCodes",
        "SymmetricPowers",
        "SymmetricSquare",
        "Taylor",
        "TwoLayerNetwork",
        "lecun_normal_",
    ],
    "attention": [
        "ConvolvedState",
        "HeavyState",
        "KeyValueRows",
        "KeyValueState",
        "LinearizedAttention",
        "MECHANISMS",
        "Mechanism",
        "PackedDocuments",
        "RecentTokens",
        "SpanState",
        "add_spans",
        "advance_positions",
        "build",
        "check_options",
        "mechanism_class",
        "mechanisms_that",
        "mechanisms_that_cross",
        "option_names",
        *(kind.__name__ for kind in MECHANISMS.values()),
    ],
    "models": [
        "EncoderConfig",
        "EncoderDecoderConfig",
        "GivenSource",
        "MaskedLanguageModel",
        "ModelConfig",
        "ModelState",
        "PRESETS",
        "PairClassifier",
        "PatchClassifier",
        "PatchEncoder",
        "PatchEncoderConfig",
        "SequenceAutoencoder",
        "SequenceClassifier",
        "TokenClassifier",
        "TransformerEncoder",
        "TransformerEncoderDecoder",
        "TransformerLM",
        "mean_token_loss",
        "preset",
        "preset_attention",
        "preset_fields",
        "token_losses",
    ],
    "data": [
        "DataDescription",
        "DocumentLanes",
        "DocumentRows",
        "LaneBatch",
        "PackedBatch",
        "PreparedData",
        "ReadOptions",
        "ShardDescription",
        "ShardedTokens",
        "Split",
        "SplitDescription",
        "TOKENIZERS",
        "TokenizerDescription",
        "TokenizerLike",
        "TrainingWindows",
        "load_tokenizer",
        "mask_tokens",
        "prepare",
        "require_same_tokenizer",
    ],
    "tasks": [
        "AnsweredRows",
        "Classification",
        "ClassifiedRows",
        "GeneratedTask",
        "Row",
        "SPLITS",
        "SequenceAnswers",
        "TASKS",
        "Task",
        "TaskBatch",
        "TaskRows",
        "is_task",
        "open_task",
        "read_task_description",
        "task_class",
        "task_digest",
        "verify_task",
        "write_task",
    ],
    "distributed": ["ContextGroup", "ContextPlan", "copies"],
    "training": [
        "RunDescription",
        "TrainingConfig",
        "TrainingResult",
        "load_answering_model",
        "load_model",
        "ray_trainer",
        "train",
    ],
    "evaluation": [
        "AnswersResult",
        "AttentionInputs",
        "ChunkStartLoss",
        "ContextLosses",
        "Evaluation",
        "Needle",
        "NeedleResult",
        "RecallResult",
        "attention_inputs",
        "column_alpha",
        "common_scale",
        "evaluate",
        "feature_weights",
        "fit_feature_map",
        "loss_at_chunk_starts",
        "losses_by_context",
        "make_needles",
        "mass_beyond_window",
        "mean_absolute_error_ratio",
        "mechanism_weights",
        "measure_answers",
        "median_relative_error",
        "needle_retrieval",
        "operator_norm",
        "operator_norm_error",
        "optimal_features",
        "optimal_frobenius_error",
        "polynomial_weights",
        "recall_accuracy",
        "recall_grid",
        "relative_frobenius_error",
        "relative_mean_absolute_error",
        "sketch_error",
    ],
    "benchmarking": [
        "AttentionSettings",
        "DecodingSettings",
        "HyperSettings",
        "PicturesSettings",
        "ServingSettings",
        "TrainingSettings",
        "Workbench",
        "measure_rates",
        "measure_serving",
        "record",
        "time_attention",
        "time_decoding",
        "time_hyper",
        "time_pictures",
        "time_training",
    ],
    "generation": [
        "AssistantDrafts",
        "Beam",
        "BeamSearchResult",
        "Drafter",
        "Engine",
        "Event",
        "GenerationResult",
        "PromptLookup",
        "Request",
        "Sampler",
        "Snapshots",
        "TextStream",
        "beam_search",
        "bytes_of_request",
        "draw",
        "generate",
        "generate_with_drafts",
        "keep_top_k",
        "keep_top_p",
        "load_conversation",
        "penalize_repetition",
        "save_conversation",
        "tokens_seen",
    ],
}


def package(name: str) -> ModuleType:
    """The imported package."""
    return importlib.import_module(f"polysketch.{name}")


def public_objects() -> list[tuple[str, object]]:
    """Every public class and function with its dotted name, and the public methods that its class defines."""
    objects = []
    for package_name in PUBLIC_NAMES:
        for name in package(package_name).__all__:
            thing = getattr(package(package_name), name)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                objects.append((f"{package_name}.{name}", thing))
            if inspect.isclass(thing):
                objects += [(f"{package_name}.{name}.{method}", getattr(thing, method)) for method in methods_of(thing)]
    return objects


def methods_of(cls: type) -> list[str]:
    """Public methods and properties written in the class itself."""
    kinds = (property, classmethod, staticmethod)
    return [
        name
        for name, member in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, kinds))
    ]


def generated_docstring(cls: type) -> str:
    """What `dataclass` writes where the author wrote nothing."""
    return f"{cls.__name__}{str(inspect.signature(cls)).replace(' -> None', '')}"


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_the_public_names_are_the_listed_ones(name):
    """No more and no fewer."""
    assert sorted(package(name).__all__) == sorted(PUBLIC_NAMES[name])


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_listed_name_exists_once(name):
    """`from polysketch.x import *` works."""
    names = package(name).__all__
    assert len(set(names)) == len(names)
    assert [each for each in names if not hasattr(package(name), each)] == []


def test_type_checkers_see_the_class_of_every_line_of_the_table():
    """The package adds the classes to its names from the table; imports are for type checkers and the site."""
    body = ast.parse(Path(attention.__file__).read_text(encoding="utf-8")).body
    (block,) = (node for node in body if isinstance(node, ast.If))
    imported = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {kind.__name__ for kind in MECHANISMS.values()} <= imported <= set(attention.__all__)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_package_says_what_it_is(name):
    """In its docstring."""
    assert (package(name).__doc__ or "").strip()


def test_every_public_name_has_a_docstring():
    """Classes, functions and public methods; what `dataclass` generates does not count."""
    assert [name for name, thing in public_objects() if not has_own_docstring(thing)] == []


def has_own_docstring(thing: object) -> bool:
    documentation = inspect.getdoc(thing)
    generated = (
        inspect.isclass(thing) and dataclasses.is_dataclass(thing) and documentation == generated_docstring(thing)
    )
    return bool(documentation) and not generated
