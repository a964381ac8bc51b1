"""The dialects of existing agent frameworks, translated onto native sessions."""
