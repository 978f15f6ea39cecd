"""Export and import of stored conversations.

One JSON lines format, ChatGPT exports, Markdown.

Reading order: format, draft, importer, token_check; then archive for whole stores.
"""
