# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in drafts from earlier responses."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/unit/drafts/test_drafts.py": [
        ("the earliest of equally long matches drafts", "drafts.suffix:draft", "        if match > best:\n            best, place = match, at", "        if match >= best:\n            best, place = match, at"),
        ("short matches draft", "drafts.suffix:draft", "best, place, in_own = shortest - 1, -1, True", "best, place, in_own = 0, -1, True"),
        ("a draft goes on in the next text", "drafts.suffix:draft", " and others[place + 1 + count] != _BETWEEN\n", "\n"),
        ("what ended so once goes on for ever", "drafts.suffix:draft", "(count < period or best >= period)", "True"),
        ("a corpus grows", "drafts.corpus:Corpus.restore", "self.forget_to(self._max_bytes)", "pass"),
        ("a long response hides those before it", "drafts.corpus:Corpus.latest", "if len(row.tokens) <= max_tokens:", "if len(row.tokens) > max_tokens:\n                break\n            else:"),
        ("the oldest rows are given", "drafts.corpus:Corpus.latest", "reversed(self._rows.get(key, ()))", "self._rows.get(key, ())"),
        ("salts are not looked at", "drafts.corpus:key_of", 'if salt else b""', 'if False else b""'),
        ("a shelf keeps what nobody needs", "drafts.shelf:Shelf.take", "if row in kept", ""),
        ("a request's new rows are beside its old text", "drafts.shelf:Shelf.take", "self._of.update(update.of_requests)", "self._of = {**update.of_requests, **self._of}"),
    ],
    "tests/unit/drafts/test_history_file.py": [
        ("a kept file is written anew each time", "drafts.history_file:HistoryFile.save", " or corpus.num_added == self._kept", ""),
        ("what comes while a file is written is lost", "drafts.history_file:HistoryFile.close", "range(2)", "range(0)"),
        ("a damaged file is read", "drafts.history_file:read_rows", "sizes.sum() != len(tokens)", "False"),
        ("tokens of another model are drafts", "drafts.history_file:HistoryFile.load", "tokens.max() < self._vocab_size", "True"),
        ("what begins with responses has no salt", "drafts.history_file:HistoryFile.load", "return digest", "return 0"),
        ("some damage stops an engine", "drafts.history_file:read_rows", "except Exception as", "except ValueError as"),
        ("compressed files are taken", "drafts.history_file:read_rows", "member.compress_type != zipfile.ZIP_STORED", "False"),
        ("a file that cannot be read stays", "files.reading:set_aside", "os.replace(path, aside)", "pass"),
        ("others may read responses", "drafts.history_file:write_rows", "private=True", "private=False"),
    ],
    "tests/vllm/scheduler/test_draft_rows.py": [
        ("the last responses are not kept", "scheduler.draft_rows:DraftRows.close", "self._file.close(self._corpus)", "pass"),
        ("requests with seeds see what they said", "scheduler.draft_rows:DraftRows.arrived", "if params.sampling_type != SamplingType.RANDOM_SEED:", "if True:"),
        ("another engine's responses come again", "scheduler.build:build", "if draft_rows.salt:", "if False:"),
        ("a salt changes nothing", "worker.runtime:seed_replica", "(salt, switch_id, replica)", "(switch_id, replica)"),
        ("aborted responses are kept", "scheduler.draft_rows:DraftRows.ended", "if reason in (FinishReason.STOP, FinishReason.LENGTH) and", "if"),
        ("siblings are not told of", "scheduler.draft_rows:DraftRows.ended", "if running else ()", "if False else ()"),
        ("a turn has a key of its own", "scheduler.draft_rows:DraftRows.arrived", "if turn.index else None", "if False else None"),
        ("after a switch ranks lack rows", "scheduler.draft_rows:DraftRows.moved", "self._changed.update(self._rows, self._id_again)", "pass"),
        ("an id that comes again has rows in a wider group", "scheduler.draft_rows:DraftRows.moved", "self._rows, self._id_again", "self._rows"),
        ("an id that comes again has the rows of the request before", "scheduler.draft_rows:DraftRows.arrived", "            self._changed.add(request.request_id)\n", "            pass\n"),
        ("a rank that lacks a row is not sent it", "scheduler.draft_rows:DraftRows.update", "if not all(", "if not any("),
        ("what has ended stays on the shelves", "scheduler.draft_rows:DraftRows.update", "if id_ not in here", "if False"),
        ("what is not scheduled is told of", "scheduler.draft_rows:DraftRows.update", "self._changed.intersection(step.num_scheduled_tokens)", "set(self._changed)"),
    ],
    "tests/unit/advice/test_replayed_drafts.py": [
        ("siblings are replayed that had not ended", "drafts.replay:replay", "if ends[at] == len(text):", "if True:"),
        ("all drafts of a step count as accepted", "drafts.replay:replay", "right.cumprod().sum()", "right.sum()"),
        ("another prompt's responses are replayed", "advice.replayed_drafts:_by_prompt", "text.prompt.tobytes()", "b''"),
    ],
    "tests/vllm/kernels/test_suffix_match.py": [
        ("kernels reach over the beginning", "kernels.suffix_match:score_kernel", "inside = alive & (back >= 0)", "inside = alive"),
        ("kernels take the first place", "kernels.suffix_match:score_kernel", "score = (match << BITS) + place + 1", "score = (match << BITS) + count - place"),
        ("kernels draft over the end of a text", "kernels.suffix_match:draft_kernel", "(ended == 0) & (score > 0)", "(copied != BETWEEN) & (score > 0)"),
        ("kernels prefer other texts", "kernels.suffix_match:score_kernel", "            score += OWN\n", "            score += OWN - OWN\n"),
        ("texts are looked through for no drafts", "worker.drafter_v1:SuffixProposer.batch_propose", "if room <= 0:", "if False:"),
        ("short matches draft long", "worker.drafter_v1:SuffixProposer.batch_propose", "min(count, match)", "count"),
        ("drafts reach over min_tokens", "worker.drafter_v1:SuffixProposer._room", "return min(k, left - 1) if left > 0 else k", "return k"),
    ],
    "tests/unit/predictor/test_acceptance.py": [
        ("new prompts' acceptance holds for repeated ones", "predictor.acceptance:AcceptanceByPrompt.observe", "self.of_repeated if repeated else self.of_new", "self.of_new"),
        ("the share of repeated prompts is that of the first", "predictor.acceptance:AcceptanceByPrompt.arrived", "self._share = self._arrived[1] / sum(self._arrived)", "self._share = self._share or self._arrived[1]"),
    ],
    "tests/engine/speculation/test_walks.py": [
        ("drafters do not hear of rows", "worker.worker:PATWorkerMixin.take_draft_rows", "self._shelf.take(update)", "pass"),
    ],
})
# fmt: on
