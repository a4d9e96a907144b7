"""The OpenAI API's responses: tokens become text, and text becomes JSON or an event stream. Imports `http`."""
