"""Training with the tools of transformers: Trainer, gradient checkpointing, PEFT, torch.compile."""

import inspect

import pytest
import torch
from transformers import Trainer, TrainingArguments

from integrations.huggingface.counting import KINDS, VOCABULARY, counting
from polysketch.integrations.huggingface import (
    LORA_TARGETS,
    PolysketchConfig,
    PolysketchEncoderForSequenceClassification,
    PolysketchForCausalLM,
    PolysketchForSequenceClassification,
)
from polysketch.models import EncoderConfig, ModelConfig, SequenceClassifier

LENGTH = 40


def fresh(kind: str, *, layers: int | None = None, **changes) -> PolysketchForCausalLM:
    """An untrained model, the same each time."""
    torch.manual_seed(0)
    config = KINDS[kind]
    layers = layers or (3 if isinstance(config["attention"], tuple) else 2)
    model_config = ModelConfig(VOCABULARY, layers, hidden_size=32, num_heads=2, **config)
    return PolysketchForCausalLM(PolysketchConfig.from_model_config(model_config, **changes))


def train(model, folder, *, resume=None, **options):
    """12 steps of Trainer on rows that are padded on the right, as its collators do; a checkpoint after 6."""
    rows = counting(64, LENGTH, torch.Generator().manual_seed(2)).tolist()
    data = []
    for number, row in enumerate(rows):
        padding = number % 7
        ids = row[: LENGTH - padding] + [0] * padding
        labels = row[: LENGTH - padding] + [-100] * padding
        data.append({"input_ids": ids, "attention_mask": [1] * (LENGTH - padding) + [0] * padding, "labels": labels})
    options = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 12, "save_steps": 6} | options
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=100, seed=0, **options
    )
    Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=resume)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_trainer_that_was_stopped_goes_on_bit_for_bit(tmp_path):
    """Twelve steps, and six resumed from the checkpoint of the first six."""
    before = fresh("polysketch-paper").state_dict()
    whole = train(fresh("polysketch-paper"), tmp_path / "run")
    assert not torch.equal(whole["model.transformer.embedding.weight"], before["model.transformer.embedding.weight"])
    resumed = train(fresh("polysketch-paper"), tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-6"))
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_labels_are_shifted_where_they_are_smoothed(tmp_path):
    """Trainer does so for the models that it knows by name."""
    model, ids = fresh("polysketch-paper"), counting(2, LENGTH, torch.Generator().manual_seed(2))
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to="none", use_cpu=True)
    found = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    losses = -model(ids).logits[:, :-1].log_softmax(-1)
    expected = 0.9 * losses.gather(-1, ids[:, 1:, None]).mean() + 0.1 * losses.mean()
    torch.testing.assert_close(found, expected)


def test_a_cache_that_is_asked_for_in_training_takes_no_gradient_away():
    model, ids = fresh("polysketch-paper").train(), counting(2, LENGTH, torch.Generator().manual_seed(2))
    found = []
    for use_cache in (False, True):
        model.zero_grad()
        output = model(ids, labels=ids, use_cache=use_cache)
        output.loss.backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert output.past_key_values.get_seq_length() == LENGTH
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_accumulated_steps_weigh_every_token_alike(tmp_path):
    """Batches of unequal padding in two parts give what they give in one: Trainer passes the number of labels."""
    whole = train(fresh("softmax"), tmp_path / "a", optim="sgd")
    parts = train(
        fresh("softmax"), tmp_path / "b", optim="sgd", gradient_accumulation_steps=2, per_device_train_batch_size=2
    )
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of_encoder", [False, True])
def test_accumulated_steps_of_a_classifier_of_texts_weigh_every_text_alike(of_encoder, tmp_path):
    """Its loss is a mean over texts: Trainer divides it by the steps that it accumulates."""
    trained = []
    for parts in (1, 2):
        torch.manual_seed(0)
        if of_encoder:
            sizes = EncoderConfig(VOCABULARY, 2, hidden_size=32, num_heads=2, attention="linear")
            model = PolysketchEncoderForSequenceClassification.from_transformer(SequenceClassifier(sizes, 3))
        else:
            model = PolysketchForSequenceClassification(fresh("softmax", num_labels=3).config)
        rows = counting(8, LENGTH, torch.Generator().manual_seed(2)).tolist()
        data = [{"input_ids": row, "attention_mask": [1] * LENGTH, "labels": n % 3} for n, row in enumerate(rows)]
        options = {"per_device_train_batch_size": 4 // parts, "gradient_accumulation_steps": parts, "max_steps": 2}
        arguments = TrainingArguments(
            str(tmp_path / str(parts)),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            seed=0,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            **options,
        )
        Trainer(model, arguments, train_dataset=data).train()
        trained.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_gradient(kind, monkeypatch):
    """Not by a bit; and every block is computed again."""
    ids = counting(2, LENGTH, torch.Generator().manual_seed(0))
    gradients, model = [], fresh(kind).train()
    calls = []
    model.inner.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert model.is_gradient_checkpointing
    assert len(calls) == 1 + 2
    assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())


def test_gradient_checkpointing_refuses_what_it_does_not_do():
    """Rather than do something else."""
    model = fresh("polysketch-paper")
    refused = {"every_n_layers": 2, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    if "offload" in inspect.signature(model.gradient_checkpointing_enable).parameters:  # since transformers 5.17
        refused["offload"] = True
    for name, value in refused.items():
        with pytest.raises(ValueError, match="recomputes every block"):
            model.gradient_checkpointing_enable(**{name: value})


class TestLora:
    """Low-rank adapters of PEFT on our projections."""

    @pytest.fixture
    def adapted(self):
        """A hybrid model with adapters on every kind of projection."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM")
        return get_peft_model(fresh("based"), config)

    def test_trains_the_adapters_alone(self, adapted, tmp_path):
        """On all projections of every block; the base stays as it was, and the loss falls."""
        before = {name: p.clone() for name, p in adapted.named_parameters()}
        layers = {name.rsplit(".lora_A", 1)[0].rsplit(".", 1)[1] for name in before if ".lora_A" in name}
        assert layers == set(LORA_TARGETS)
        ids = counting(4, LENGTH, torch.Generator().manual_seed(0))
        first = adapted(input_ids=ids, labels=ids).loss.item()
        train(adapted, tmp_path)
        for name, parameter in adapted.named_parameters():
            assert torch.equal(parameter, before[name]) != ("lora_" in name), name
        assert adapted(input_ids=ids, labels=ids).loss.item() < first

    def test_merged_is_the_same_function(self, adapted):
        """A plain model again, that generates alike."""
        torch.manual_seed(1)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted = adapted.eval().double()
        ids = counting(2, LENGTH, torch.Generator().manual_seed(0))
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        options["attention_mask"] = torch.ones_like(ids)
        logits, tokens = adapted(input_ids=ids).logits, adapted.generate(input_ids=ids, **options)
        assert not torch.allclose(logits, fresh("based").eval().double()(ids).logits, atol=1e-3)
        merged = adapted.merge_and_unload()
        assert type(merged) is PolysketchForCausalLM
        torch.testing.assert_close(merged(ids).logits, logits)
        assert torch.equal(merged.generate(ids, **options), tokens)

    def test_is_saved_and_loaded(self, adapted, tmp_path):
        """The adapter alone, over the same base."""
        from peft import PeftModel

        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(tmp_path)
        ids = counting(2, LENGTH, torch.Generator().manual_seed(0))
        loaded = PeftModel.from_pretrained(fresh("based"), tmp_path).eval()
        assert torch.equal(loaded(input_ids=ids).logits, adapted.eval()(input_ids=ids).logits)


class TestCompile:
    """torch.compile of the forward pass, without a graph break."""

    @staticmethod
    def check(kind: str, backend: str, layers: int | None = None) -> None:
        """Compare loss and gradients with those of the plain pass."""
        torch.compiler.reset()
        ids = counting(2, LENGTH, torch.Generator().manual_seed(0))
        plain, model = (fresh(kind, layers=layers).train() for _ in range(2))
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        expected, found = plain(ids, labels=ids), compiled(input_ids=ids, labels=ids)
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        expected.loss.backward()
        found.loss.backward()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)

    @pytest.mark.full  # tests/models compiles what is inside
    def test_with_its_graph_run_as_it_is(self):
        """One graph, forward and backward."""
        self.check("polysketch-paper", "aot_eager", layers=1)

    @pytest.mark.full
    @pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
    @pytest.mark.parametrize("kind", KINDS)
    def test_with_generated_code(self, kind):
        """By the compiler that people use."""
        self.check(kind, "inductor")
