"""What the cost model is worth: its speed, its bounds, and its errors on published figures."""
