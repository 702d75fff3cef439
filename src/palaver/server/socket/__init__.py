"""`/ws/chat`: turns over a WebSocket, text and sound, as the clients of an omni model's demo speak it."""
