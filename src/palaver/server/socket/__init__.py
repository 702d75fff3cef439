"""`/ws/chat`: turns over a WebSocket, with text and audio, in the protocol of an omni model's demo."""
