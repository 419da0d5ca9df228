"""The controller: one actor per cluster. It owns the hard state and reconciles."""
