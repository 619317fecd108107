"""The main job, small: made stories, tokenizer, training, scraping, plan, export, continuations.

Runs the project's own commands as a user would; no other room imports it.
"""

from sgt_ds.demo.stories import tell_story, write_corpus

__all__ = ["tell_story", "write_corpus"]
