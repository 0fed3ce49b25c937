// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who decides what is left when the machine stops: chance, or a list that is gone through.

use crate::random::Random;

/// What becomes of a write that may survive or not.
#[derive(Debug)]
pub enum Fate<'a> {
    /// Chance, torn writes included.
    Chance,
    /// As chosen, the first block of each write and its others.
    Chosen(&'a mut Choices),
}

/// A list of choices, made anew each time the same questions are asked, until all are through.
#[derive(Debug, Default)]
pub struct Choices {
    /// What was chosen, of how many.
    made: Vec<(u64, u64)>,
    asked: usize,
    sample: Option<Random>,
}

impl Choices {
    /// Choices by chance: a sample where there are too many.
    pub fn sample(random: Random) -> Choices {
        Choices { sample: Some(random), ..Choices::default() }
    }

    /// One of `0..count`.
    pub fn below(&mut self, count: u64) -> u64 {
        if self.asked == self.made.len() {
            let choice = self.sample.as_mut().map_or(0, |random| random.below(count));
            self.made.push((choice, count));
        }
        self.asked += 1;
        self.made[self.asked - 1].0
    }

    /// In how many ways the questions asked so far can be answered.
    pub fn alternatives(&self) -> u64 {
        self.made.iter().fold(1, |product, (_, count)| product.saturating_mul(*count))
    }

    /// Goes on to the next list of choices; says whether there is one.
    pub fn advance(&mut self) -> bool {
        self.asked = 0;
        if self.sample.is_some() {
            self.made.clear();
            return true;
        }
        while let Some((choice, count)) = self.made.pop() {
            if choice + 1 < count {
                self.made.push((choice + 1, count));
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::Choices;

    #[test]
    fn every_list_of_choices_comes_once() {
        let mut choices = Choices::default();
        let mut seen = Vec::new();
        loop {
            let first = choices.below(2);
            // What is asked may depend on what was chosen.
            let rest = if first == 0 { choices.below(3) } else { 7 };
            seen.push((first, rest));
            if !choices.advance() {
                break;
            }
        }
        assert_eq!(seen, [(0, 0), (0, 1), (0, 2), (1, 7)]);
    }
}
