"""Export and import of stored conversations.

One JSON lines format, ChatGPT exports, Markdown.

Reading order: format, draft, importer, chatgpt, markdown; then archive, archive_reader and archive_v1 for whole stores.
"""
