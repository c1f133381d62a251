# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in drafts from earlier responses."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

HISTORY = "tests/unit/drafts/test_history_file.py"
REPLAYED = "tests/unit/advice/test_drafts.py"
DRAFTS = "tests/unit/drafts/test_drafts.py"
ROWS = "tests/vllm/scheduler/test_draft_rows.py"
KERNELS = "tests/vllm/kernels/test_suffix.py"
ACCEPTANCE = "tests/unit/predictor/test_acceptance.py"
WALKS = "tests/engine/speculation/test_walks.py"

# fmt: off
_ROWS = [
    ("the earliest of equally long matches drafts", "drafts.suffix:draft", "        if match > best:\n            best, place = match, at", "        if match >= best:\n            best, place = match, at", DRAFTS),
    ("short matches draft", "drafts.suffix:draft", "best, place, in_own = shortest - 1, -1, True", "best, place, in_own = 0, -1, True", DRAFTS),
    ("a draft goes on in the next text", "drafts.suffix:draft", " and others[place + 1 + count] != _BETWEEN\n", "\n", DRAFTS),
    ("what ended so once goes on for ever", "drafts.suffix:draft", "(count < period or best >= period)", "True", DRAFTS),
    ("a corpus grows", "drafts.corpus:Corpus._append", "self.forget_to(self._max_bytes)", "pass", DRAFTS),
    ("the oldest rows are given", "drafts.corpus:Corpus.latest", "reversed(self._rows.get(key, ()))", "self._rows.get(key, ())", DRAFTS),
    ("a kept file is written anew each time", "drafts.history_file:HistoryFile.save", " or corpus.num_added == self._kept", "", HISTORY),
    ("what comes while a file is written is lost", "drafts.history_file:HistoryFile.close", "range(2)", "range(0)", HISTORY),
    ("a damaged file is read", "drafts.history_file:read_rows", "sizes.sum() != len(tokens)", "False", HISTORY),
    ("compressed files are taken", "drafts.history_file:read_rows", "one.compress_type != zipfile.ZIP_STORED", "False", HISTORY),
    ("a file that cannot be read stays", "drafts.history_file:HistoryFile.load", "os.replace(self._path, aside)", "pass", HISTORY),
    ("others may read responses", "drafts.history_file:write_rows", "private=True", "private=False", HISTORY),
    ("the last responses are not kept", "scheduler.draft_rows:DraftRows.close", "self._file.close(self._corpus)", "pass", ROWS),
    ("siblings are replayed that had not ended", "drafts.replay:replay", "if ends[at] == len(text):", "if True:", REPLAYED),
    ("all drafts of a step count as accepted", "drafts.replay:replay", "right.cumprod().sum()", "right.sum()", REPLAYED),
    ("another prompt's responses are replayed", "advice.drafts:_by_prompt", "one.prompt.tobytes()", "b''", REPLAYED),
    ("salts are not looked at", "drafts.corpus:key_of", '(salt or "")', '("")', DRAFTS),
    ("a shelf keeps what nobody needs", "drafts.shelf:Shelf.take", "if row in kept", "", DRAFTS),
    ("a request's new rows are beside its old text", "drafts.shelf:Shelf.take", "self._of.update(update.of_requests)", "self._of = {**update.of_requests, **self._of}", DRAFTS),
    ("requests with seeds see what they said", "scheduler.draft_rows:DraftRows.arrived", "if params.sampling_type != SamplingType.RANDOM_SEED:", "if True:", ROWS),
    ("aborted responses are kept", "scheduler.draft_rows:DraftRows.ended", "if reason in (FinishReason.STOP, FinishReason.LENGTH) and", "if", ROWS),
    ("siblings are not told of", "scheduler.draft_rows:DraftRows.ended", "if running else ()", "if False else ()", ROWS),
    ("a turn has a key of its own", "scheduler.draft_rows:DraftRows.arrived", "if turn.index else None", "if False else None", ROWS),
    ("after a switch ranks lack rows", "scheduler.draft_rows:DraftRows.moved", "self._changed.update(self._rows)", "pass", ROWS),
    ("a rank that lacks a row is not sent it", "scheduler.draft_rows:DraftRows.update", "if not all(", "if not any(", ROWS),
    ("what has ended stays on the shelves", "scheduler.draft_rows:DraftRows.update", "if one not in here", "if False", ROWS),
    ("what is not scheduled is told of", "scheduler.draft_rows:DraftRows.update", "self._changed.intersection(step.num_scheduled_tokens)", "set(self._changed)", ROWS),
    ("kernels reach over the beginning", "kernels.suffix:score_kernel", "inside = alive & (back >= 0)", "inside = alive", KERNELS),
    ("kernels take the first place", "kernels.suffix:score_kernel", "score = (match << BITS) + place + 1", "score = (match << BITS) + count - place", KERNELS),
    ("kernels draft over the end of a text", "kernels.suffix:draft_kernel", "(ended == 0) & (score > 0)", "(found != BETWEEN) & (score > 0)", KERNELS),
    ("kernels prefer other texts", "kernels.suffix:score_kernel", "            score += OWN\n", "            score += OWN - OWN\n", KERNELS),
    ("new prompts' acceptance holds for repeated ones", "predictor.acceptance_by_prompt:AcceptanceByPrompt.observe", "(self.of_repeated if repeated else self.of_new)", "self.of_new", ACCEPTANCE),
    ("the share of repeated prompts is that of the first", "predictor.acceptance_by_prompt:AcceptanceByPrompt.arrived", "self._share = self._arrived[1] / sum(self._arrived)", "self._share = self._share or self._arrived[1]", ACCEPTANCE),
    ("drafters do not hear of rows", "worker.worker:PATWorkerMixin.take_draft_rows", "self._shelf.take(update)", "pass", WALKS),
    ("drafts reach over min_tokens", "worker.drafter_v1:SuffixProposer._room", "return min(k, left - 1) if left > 0 else k", "return k", KERNELS),
]
# fmt: on

MUTATIONS = [
    Mutation(name, f"pat_vllm.{function}", {old: new}, (tests,))
    for name, function, old, new, tests in _ROWS
]
