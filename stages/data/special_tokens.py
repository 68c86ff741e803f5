"""The tokens that are no text. Their ids are the same in every vocabulary."""

BOT = "[BOT]"
"""Begins every document."""
EOT = "[EOT]"
"""Ends every document."""
PAD = "[PAD]"
"""Fills a sequence up to its length; never a target."""

SPECIAL_TOKENS = (BOT, EOT, PAD)
BOT_ID, EOT_ID, PAD_ID = range(3)
