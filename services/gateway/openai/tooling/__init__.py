"""Tools of a chat: how they are declared, how the model is told of them, which call is required."""
