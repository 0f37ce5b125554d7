"""kvbench as a model of lm-eval: the engine answers lm-eval's tasks with an eviction method at a budget.

    kvbench lm-eval --model kvbench --model_args model=tiny,method=gkv,budget=64 --tasks kvbench_chain
    lm_eval.simple_evaluate(model=KVBenchLM(method="gkv", budget=64), tasks=["gsm8k"])

Generation equals that of `kvbench run`: same engine, plan, stop rules and random numbers, so equal prompts give equal
answers. Repeats of a request are samples of one prompt, which the engine reads once.

Log-likelihoods are computed with the evicted cache: the engine reads the context except its last token, evicts, and
then reads the last token and the continuation against the remaining entries. The usual way, by the logits of the
prompt's forward pass, would score a one-token answer with the full cache for every method.

Not covered: `loglikelihood_rolling` (nothing is evicted), several processes (``accelerate launch``), images and sound.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import lm_eval.models  # noqa: F401  lm-eval registers its models only while the registry is empty
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, postprocess_generated_text
from tqdm import tqdm

from kvbench.console import terminal
from kvbench.engine.cache.layout import check_prefill
from kvbench.engine.loop import Engine
from kvbench.engine.model.division import mover
from kvbench.engine.model.load import load
from kvbench.engine.model.shape import shape_of_model, use_threads
from kvbench.engine.plan import measure, plan_cell
from kvbench.errors import SetupError, UserError
from kvbench.integrations.model_args import ModelArgs, in_its_words, read
from kvbench.integrations.stored_answers import check_stored_answers, identity_of
from kvbench.integrations.yaml_tasks import DOC, TASK, use_settings
from kvbench.records import Generation, Request, Sampling, Usage
from kvbench.runner.cell import MethodState
from kvbench.runner.spool import Spool
from kvbench.sources import adapters, models
from kvbench.taskkit import prompts, template_variables
from kvbench.taskkit.lm_eval_source import generation
from kvbench.taskkit.reader import ModelReader, special_stops


@register_model("kvbench")
class KVBenchLM(TemplateLM):
    """A model of lm-eval. `model_args`: see `kvbench.integrations.model_args`.

    Raises UserError if an argument is invalid, SetupError if the model cannot be loaded.
    """

    def __init__(
        self,
        batch_size: int | str | None = None,
        max_batch_size: int | str | None = None,
        device: str | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__()
        self.args: ModelArgs = read(model_args, device=device, batch_size=batch_size)
        run = self.args.run
        with in_its_words():
            check_prefill(self.args.method(), run.prefill, self.args.choice.label)
        info = models.describe(run.model, run.revision)
        if info.folder is not None and info.where == str(info.folder):
            models.check_tokenizer(run.model, info.folder)
        where, adapter = info.where, adapters.find(run.adapter)
        move = mover(run.device_map, run.device)
        self.loaded = load(where, revision=run.revision, device=run.device, dtype=run.dtype, adapter=adapter, move=move)
        self.tokenizer = self.loaded.tokenizer
        if run.chat_template is not None:
            self.tokenizer.chat_template = prompts.load_template(run.chat_template)
        self._variables = template_variables.parse(run.template_option)
        info = models.describe(run.model, run.revision)  # the folder of a hub model is known only now
        self.revision = models.revision(info)
        with in_its_words():
            state = MethodState.of(self.args.choice, self.loaded.model.config, info)
        dtype, own = str(self.loaded.dtype), adapter.identity if adapter else None
        self.identity = identity_of(self.args, state, weights=self.revision, dtype=dtype, adapter=own)
        self._probes = state.method.during("prefill").needs().probes
        self.shape = shape_of_model(self.loaded.model)
        use_threads(self.shape, self.loaded.device)
        self.machine = measure(self.loaded.device, self.loaded.dtype)
        self._device = self.loaded.device
        self._templated, self._used = False, list[Usage]()
        self._headers = dict[bool, tuple[int, ...]]()  # by whether a template counts
        use_settings(run)

    # --- text and tokens ----------------------------------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        return self.loaded.context

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that the model reads in place of an empty context, as in lm-eval's model `hf`.

        Raises UserError if the tokenizer has neither a start token nor an end token.
        """
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise UserError("the tokenizer has no start or end token to stand for an empty context. Use another model.")

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text. add_special_tokens: whether the tokenizer adds its special tokens; None: it
        does, unless a chat template renders the prompts or the text begins with the start token already."""
        if add_special_tokens is None:
            add_special_tokens = not (self._templated or has_bos_prefix(string, self.tokenizer.bos_token))
        return prompts.encode(self.tokenizer, string, chat=not add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template that lm-eval records, None if `chat_template` is False; note for `tok_encode` whether a
        template renders prompts. The template of `model_args` or, without it, the tokenizer's default renders them,
        even if `chat_template` names another. Raises UserError if prompts need it and it is missing or unusable."""
        self._templated = bool(chat_template)
        prompts.check_template(self.tokenizer, chat=self._templated, variables=self._variables)
        return super().chat_template(chat_template)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation. Raises UserError if the template fails; lm-eval's own model `hf` would then try again
        without the system message."""
        self._templated = True
        run, template = self.args.run, prompts.template_text(self.tokenizer)
        how = (run.thinking, template, self._variables, run.chat_template or "of the tokenizer")
        with in_its_words():
            return prompts.apply(self.tokenizer, chat_history, *how, continued=not add_generation_prompt)

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return one generated text per request, in order. An Instance that is k times in the list gets k samples."""
        repeats: dict[int, int] = {}
        numbered = []  # (request, sample)
        for instance in requests:
            numbered.append((id(instance), repeats.get(id(instance), 0)))
            repeats[id(instance)] = numbered[-1][1] + 1
        instances = {id(instance): instance for instance in requests}
        spool = Spool()
        questions = {key: self._question(instance, repeats[key], spool) for key, instance in instances.items()}
        owner = {id(request): key for key, request in questions.items()}
        texts: dict[tuple[int, int], str] = {}
        for done in self._run(list(questions.values()), "Generating", disable_tqdm):
            instance = instances[key := owner[id(done.request)]]
            text = postprocess_generated_text(done.text, None, self.args.think_end_token)
            texts[key, done.sample] = text
            if done.request.sampling.temperature == 0:  # else lm-eval would give all samples one stored text
                self.cache_hook.add_partial("generate_until", instance.args, text)
        return [texts[each] for each in numbered]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each continuation the sum of its log-probabilities, and whether greedy decoding would give it."""
        spool = Spool()
        continuations = [self._continuation(context, continuation, spool) for _, context, continuation in requests]
        place = {id(request): index for index, request in enumerate(continuations)}
        answers: dict[int, tuple[float, bool]] = {}
        for done in self._run(continuations, "Scoring", disable_tqdm):
            index = place[id(done.request)]
            answers[index] = sum(done.log_probs), bool(done.greedy)
            self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
        return [answers[index] for index in range(len(continuations))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise UserError(
            "kvbench does not measure the perplexity of whole texts: no entry would be evicted before the scoring. "
            "Use tasks that generate, or that score a continuation of a context."
        )

    def _question(self, instance: Instance, samples: int, spool: Spool) -> Request:
        """Return the engine's request for a prompt.

        The request names its task and document as `kvbench run` does, so that sampling draws the same random numbers.
        """
        context, kwargs = instance.args[:2]
        spec = generation(kwargs)
        stop, special = special_stops(spec.stop, self.tokenizer)
        ids = self._fit(self.tok_encode(context), spec.max_new_tokens, least=1)
        own = isinstance(instance.doc, dict) and DOC in instance.doc
        doc_id = str(instance.doc_id) if not instance.idx else f"{instance.doc_id}-{instance.idx}"
        return Request(
            task=instance.doc[TASK] if own else f"lm_eval:{instance.task_name}",
            doc_id=instance.doc[DOC] if own else doc_id,
            prompt_ids=spool.ids(ids),
            samples=tuple(range(samples)),
            max_new_tokens=min(spec.max_new_tokens, self.max_length - len(ids)),
            sampling=Sampling.of(spec),
            stop_strings=stop,
            stop_ids=tuple(int(self.tokenizer.convert_tokens_to_ids(token)) for token in special),
            seed=self.args.run.seed,
            reply_header=self._reply_header(),
        )

    def _continuation(self, context: list[int], continuation: list[int], spool: Spool) -> Request:
        """Return the engine's request that computes a continuation's log-probability.

        The request's doc_id, from which random numbers follow, is the hash of the context after truncation. Choices
        with equal contexts are therefore scored with the same evicted cache, even if the method draws random numbers.
        """
        if not continuation:
            raise UserError(
                "lm-eval asks for the likelihood of an empty continuation; use a task whose choices are not empty."
            )
        ids = self._fit(context or [self.prefix_token_id], len(continuation), least=len(continuation))
        return Request(
            task="lm_eval",
            doc_id=hashlib.blake2b(repr(ids).encode(), digest_size=16).hexdigest(),
            prompt_ids=spool.ids(ids),
            max_new_tokens=len(continuation),
            forced=tuple(continuation),
            seed=self.args.run.seed,
            compress_at=len(ids) - 1 if len(ids) > 1 else None,
            reply_header=self._reply_header(),
        )

    def _reply_header(self) -> tuple[int, ...]:
        """Return the tokens that the chat template puts before a reply; () if no template renders the prompts or the
        method has no probes."""
        if (chat := self._templated and self._probes) not in self._headers:
            how: dict[str, Any] = {"model_type": "", "context": 0, "chat": chat, "variables": self._variables}
            reader = ModelReader(tokenizer=self.tokenizer, **how)
            self._headers[chat] = reader.reply_header(thinking=self.args.run.thinking)
        return self._headers[chat]

    def _fit(self, ids: Sequence[int], output: int, *, least: int) -> tuple[int, ...]:
        """Return a prompt's tokens. With the argument ``truncate=left``, drop as many of the first tokens as needed, so
        that the model's context has room for `output` more tokens.

        Raises UserError if the context has no room for `least` more tokens after the returned tokens.
        """
        if self.args.truncate == "left" and output < self.max_length:
            ids = ids[-(self.max_length - output) :]
        if len(ids) + least > self.max_length:
            cure = (
                "Ask for fewer new tokens."
                if self.args.truncate == "left"
                else "Give truncate=left in model_args to drop the prompt's first tokens, as lm-eval's 'hf' does."
            )
            raise UserError(
                f"a prompt of {len(ids)} tokens and an answer of {least} tokens exceed the model's context of "
                f"{self.max_length} tokens. {cure}"
            )
        return tuple(ids)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def _run(self, requests: list[Request], what: str, disable_tqdm: bool) -> Iterator[Generation]:
        """Run the requests on a new engine, and yield every sample as it finishes.

        what: title of the progress bar. Raises SetupError if a sample ends with another status than "ok".
        """
        batches: dict[Sampling, list[Request]] = {}
        for request in requests:
            batches.setdefault(request.sampling, []).append(request)
        total = sum(len(request.samples) for request in requests)
        if not total:
            return
        with in_its_words():
            engine = self._engine(requests, total)
        with tqdm(total=total, desc=what, disable=disable_tqdm) as bar:
            for done in chain.from_iterable(map(engine.generate, batches.values())):
                if done.status != "ok":
                    raise SetupError(
                        f"no answer to a prompt of {len(done.request.prompt_ids)} tokens: {done.status} ({done.note})."
                    )
                if done.usage is not None:
                    self._used.append(done.usage)
                bar.update()
                yield done

    def _engine(self, requests: list[Request], sequences: int) -> Engine:
        """Return an engine for requests with `sequences` samples in all; its slots are planned as in `kvbench run`."""
        run, method = self.args.run, self.args.method()
        settings: dict[str, Any] = {
            "budget": self.args.budget,
            "interval": run.interval,
            "max_tokens": max(len(r.prompt_ids) + r.max_new_tokens for r in requests),
            "max_output": max(r.max_new_tokens for r in requests),
            "tail": max(len(r.prompt_ids) - (r.compress_at or len(r.prompt_ids)) for r in requests),
            "prefill_chunk": run.prefill_chunk,
            "prefill": run.prefill,
            "backend": run.decode_attn,
        }
        plan = plan_cell(
            self.shape,
            self.machine,
            method,
            sequences=sequences,
            slots=run.slots,
            device=self.loaded.device,
            dtype=self.loaded.dtype,
            max_prompt=max(len(r.prompt_ids) for r in requests),
            samplings={r.sampling for r in requests},
            **settings,
        )
        settings |= {"compiled": not run.no_compile, "program": bool(run.compile_cpu), "notice": terminal.warning}
        return Engine(self.loaded, method, slots=plan.slots, **settings)

    # --- records ------------------------------------------------------------------------------------------------------

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Use lm-eval's file of stored answers (``--use_cache``). Raises UserError if these answers were made with
        settings that are unknown, or that differ from this model's."""
        super().set_cache_hook(cache_hook)
        if cache_hook.dbdict is not None:
            check_stored_answers(cache_hook.dbdict, self.identity)

    def get_model_info(self) -> dict[str, Any]:
        """Return the model, method, budget and measured memory for lm-eval's results."""
        used = self._used
        after = [u.entries_after_evict for u in used if u.entries_after_evict is not None]
        return {
            "model_num_parameters": self.shape.parameters,
            "model_dtype": str(self.loaded.dtype),
            "model_revision": self.args.run.revision,
            "model_sha": self.revision,
            "kvbench": self.identity
            | {
                "output_tokens": sum(u.output_tokens for u in used),
                "evictions": sum(u.evictions for u in used),
                "entries_after_evict": max(after, default=None),
                "entries_peak": max((u.entries_peak for u in used), default=None),
                "kv_bytes_peak": max((u.kv_bytes_peak for u in used), default=None),
            },
        }
