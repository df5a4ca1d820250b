"""The prompt source over a corpus: order, position, tokenization, and the length limit."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.data.order import identity, permutation
from posttrain.data.source import Corpus, Cursor, Row, Tokenizer
from posttrain.errors import DataError
from posttrain.records import Prompt


class CorpusPromptSource:
    """Draws the rows of a corpus, epoch after epoch, as tokenized prompts.

    Without `shuffle` every epoch visits the rows in their own order; with it epoch e visits the permutation made from
    seed + e. The position is two integers, so a restored source continues exactly where the saved one stood.
    """

    def __init__(self, corpus: Corpus, *, tokenizer: Tokenizer, seed: int, shuffle: bool, max_prompt_tokens: int | None = None) -> None:
        if not len(corpus):
            raise DataError("the corpus holds no rows, it must have one; check the data configuration")
        self.columns = corpus.columns
        self.skipped_too_long = 0
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._seed = seed
        self._shuffle = shuffle
        self._max_prompt_tokens = max_prompt_tokens
        self._move(epoch=0, index=0)

    def draw(self, count: int) -> Sequence[Prompt]:
        prompts: list[Prompt] = []
        while len(prompts) < count:
            prompt = self._next()
            if prompt is not None:
                prompts.append(prompt)
        return prompts

    def cursor(self) -> Cursor:
        return Cursor(epoch=self._epoch, index=self._index, seed=self._seed)

    def restore(self, cursor: Cursor) -> None:
        if cursor.seed != self._seed:
            raise DataError(
                f"cursor.seed={cursor.seed}: the position was saved under another data seed than {self._seed}, so it means other prompts; "
                f"set the data seed (rl.seed, or rollout.seed where it is followed) back to {cursor.seed}"
            )
        if cursor.epoch < 0 or not 0 <= cursor.index < len(self._corpus):
            raise DataError(
                f"cursor epoch={cursor.epoch} index={cursor.index}: must lie inside a corpus of {len(self._corpus)} rows; "
                "resume with the data the position was saved with"
            )
        self._move(epoch=cursor.epoch, index=cursor.index)

    def _move(self, *, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = permutation(len(self._corpus), seed=self._seed + epoch) if self._shuffle else identity
        # Rows before a position in the middle were drawn by an earlier process: nothing is known against them.
        self._epoch_usable = index > 0

    def _next(self) -> Prompt | None:
        """Consume one row: its prompt, or None when it is too long."""
        row = self._corpus[self._order(self._index)]
        text, token_ids = self._encoded(row)
        limit = self._max_prompt_tokens
        usable = limit is None or len(token_ids) <= limit
        prompt = None
        if usable:
            prompt = Prompt(
                id=f"{row.key}@{self._epoch}",
                content=row.prompt,
                text=text,
                token_ids=tuple(token_ids),
                reference=row.reference,
                representations=row.representations,
            )
            self._epoch_usable = True
        else:
            self.skipped_too_long += 1
        self._index += 1
        if self._index == len(self._corpus):
            if not self._epoch_usable:
                raise DataError(
                    f"max_prompt_tokens={limit}: all {len(self._corpus)} prompts of the corpus are longer (row {row.key!r} has "
                    f"{len(token_ids)} tokens), at least one must fit; raise max_prompt_tokens"
                )
            self._move(epoch=self._epoch + 1, index=0)
        return prompt

    def _encoded(self, row: Row) -> tuple[str, list[int]]:
        if isinstance(row.prompt, str):
            text = row.prompt
            token_ids = self._tokenizer.encode(text, add_special_tokens=True)
        else:
            text = self._rendered(row)
            # The template has written the special tokens already; adding them again would double the first one.
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not token_ids:
            raise DataError(f"row {row.key!r}: its prompt {text!r} has no tokens, it must have one; drop the row or give it text")
        return text, token_ids

    def _rendered(self, row: Row) -> str:
        if not self._tokenizer.chat_template:
            raise DataError(
                f"row {row.key!r}: its prompt is a conversation but the tokenizer has no chat template; use an instruction-tuned model, "
                "or a source of raw text (arithmetic.chat=false, or a text prompt column)"
            )
        try:
            return self._tokenizer.apply_chat_template(list(row.prompt), add_generation_prompt=True, tokenize=False)
        except Exception as error:
            # Templates are programs that refuse what they do not know (system turns, two user turns in a row, ...).
            raise DataError(
                f"row {row.key!r}: the chat template refuses the conversation: {type(error).__name__}: {error}; change its turns"
            ) from error
