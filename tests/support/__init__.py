"""What several test tiers share: whole systems on free ports, and load that counts every answer."""
