// The frame of every HTML page that Headroom writes: `report` and `inspect --html`.
#ifndef HEADROOM_SRC_RECORD_PAGE_H_
#define HEADROOM_SRC_RECORD_PAGE_H_

#include <string>
#include <string_view>
#include <vector>

namespace headroom::internal {

/// Escapes text for HTML content and quoted attributes. Invalid UTF-8 and control characters other
/// than tabs and newlines become U+FFFD.
std::string escape(std::string_view text);

/// A complete page. `title` is text; `body` is HTML and may contain <script> and <style>. The
/// page's content security policy forbids network access other than to the server it came from. It
/// follows the reader's light or dark setting and fits a phone.
///
/// The style sheet provides:
///   <header>            the title: <h1>, and <p class="sub"> below it
///   <section>           a card: <h2>, <p class="note">, figures and tables
///   <div class="facts"> key figures in a row: <div><b>131072</b><span>final scale</span></div>
///   <div class="wide">  around a <table>, so that it scrolls sideways on a phone
///   td.n, th.n          right-aligned numbers; td.good, td.bad for verdicts
///   colours             var(--ink), --muted, --line, --card, --page, --blue, --orange, --green,
///                       --purple, --gold: distinguishable for colour-blind readers in both
///                       settings; --run0 to --run5 for the curves of compared runs
std::string page(std::string_view title, std::string_view body);

/// The colours --run0, ... in the light setting, as "#rrggbb", for plots outside of a page.
std::vector<std::string> run_colours();

}  // namespace headroom::internal

#endif  // HEADROOM_SRC_RECORD_PAGE_H_
