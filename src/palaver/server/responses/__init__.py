"""OpenAI's Responses: replies that are kept in conversations, gone back to by their ids, and resumed by number."""
